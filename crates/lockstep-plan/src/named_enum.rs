//! Enums whose variants have names in plans, settings, reports and messages.

/// Declares an enum with a name for each variant. Implements its serialized form, `ALL`, `NAMES`, `name` and `Display`.
macro_rules! named_enum {
    (
        $(#[$attribute:meta])*
        pub enum $Name:ident {
            $( $(#[$of_variant:meta])* $Variant:ident = $name:literal, )+
        }
    ) => {
        $(#[$attribute])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
        pub enum $Name {
            $( $(#[$of_variant])* #[serde(rename = $name)] $Variant, )+
        }

        impl $Name {
            /// Names of all variants, in the order of their declaration.
            pub const NAMES: &'static [&'static str] = &[$($name),+];

            /// All variants, in the order of their declaration.
            pub const ALL: [Self; Self::NAMES.len()] = [$(Self::$Variant),+];

            /// Returns the name in files and messages.
            pub const fn name(self) -> &'static str {
                match self {
                    $( Self::$Variant => $name, )+
                }
            }
        }

        impl std::fmt::Display for $Name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.name())
            }
        }
    };
}

pub(crate) use named_enum;
