//! Enums that are written as words: in plans, settings, reports and messages.

/// Declares an enum with a word for each variant, and implements its serialized form, the list of its variants, the method that returns
/// a variant's word, and `Display`.
macro_rules! words {
    (
        $(#[$attribute:meta])*
        pub enum $Name:ident by $word_of:ident {
            $( $(#[$of_variant:meta])* $Variant:ident = $word:literal, )+
        }
    ) => {
        $(#[$attribute])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
        pub enum $Name {
            $( $(#[$of_variant])* #[serde(rename = $word)] $Variant, )+
        }

        impl $Name {
            /// All of them, in the order of their declaration.
            pub const ALL: [Self; [$($word),+].len()] = [$(Self::$Variant),+];

            /// Returns the word in files and messages.
            pub const fn $word_of(self) -> &'static str {
                match self {
                    $( Self::$Variant => $word, )+
                }
            }
        }

        impl std::fmt::Display for $Name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.$word_of())
            }
        }
    };
}

pub(crate) use words;
