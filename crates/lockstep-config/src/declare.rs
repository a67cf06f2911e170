//! Declaration of keys: [`Key`], its [`Rules`], and the macro that derives structs, defaults, reading and the list of keys from one
//! table (`keys`).

use std::fmt;

use serde_json::{Map, Value};

use crate::value::{Readable, ValueType};

/// One key of RUN.toml.
#[derive(Debug, Clone)]
pub struct Key {
    /// The name, `section.key`.
    pub name: &'static str,
    /// Type of its value.
    pub value_type: ValueType,
    /// Value if nobody sets the key; `null` if it is derived (`rules.when_absent` says how).
    pub default: Value,
    /// Range, derivation and role.
    pub rules: Rules,
    /// Meaning of the key, in sentences.
    pub doc: String,
    /// Path of the field of a [`Plan`](lockstep_plan::Plan) that the key sets; `None` for a key that plans do not have.
    pub field: Option<&'static str>,
}

impl Key {
    /// Returns the section that the key belongs to.
    pub fn section(&self) -> &'static str {
        self.name.split_once('.').map_or(self.name, |(section, _)| section)
    }

    /// Returns the name within the section.
    pub fn key(&self) -> &'static str {
        self.name.split_once('.').map_or(self.name, |(_, key)| key)
    }
}

/// One section of RUN.toml.
#[derive(Debug, Clone)]
pub struct Section {
    /// The name, without brackets.
    pub name: &'static str,
    /// Content of the section, in sentences.
    pub doc: String,
    /// Keys that are planned but not implemented.
    pub later: &'static [&'static str],
}

/// Constraints on a key's value beyond the type, and the role of the key.
#[derive(Debug, Clone, Copy)]
pub struct Rules {
    low: Option<Bound>,
    high: Option<Bound>,
    /// Value that is used if the key is not set and has no fixed default, in words.
    pub when_absent: Option<&'static str>,
    /// True if the losses of the run depend on the key beyond rounding.
    pub defines_numbers: bool,
    /// Words of the type's choice that the key accepts; `None` for all.
    words: Option<&'static [&'static str]>,
}

#[derive(Debug, Clone, Copy)]
struct Bound {
    value: f64,
    included: bool,
}

/// Returns rules without a range, for a key that does not affect the numbers of a run.
pub(crate) const fn rules() -> Rules {
    Rules { low: None, high: None, when_absent: None, defines_numbers: false, words: None }
}

impl Rules {
    pub(crate) const fn at_least(mut self, value: f64) -> Self {
        self.low = Some(Bound { value, included: true });
        self
    }

    pub(crate) const fn above(mut self, value: f64) -> Self {
        self.low = Some(Bound { value, included: false });
        self
    }

    pub(crate) const fn at_most(mut self, value: f64) -> Self {
        self.high = Some(Bound { value, included: true });
        self
    }

    pub(crate) const fn below(mut self, value: f64) -> Self {
        self.high = Some(Bound { value, included: false });
        self
    }

    pub(crate) const fn when_absent(mut self, text: &'static str) -> Self {
        self.when_absent = Some(text);
        self
    }

    pub(crate) const fn defines_numbers(mut self) -> Self {
        self.defines_numbers = true;
        self
    }

    pub(crate) const fn words(mut self, words: &'static [&'static str]) -> Self {
        self.words = Some(words);
        self
    }

    /// Returns a key's type, restricted to the words that it accepts.
    pub(crate) const fn narrowed(&self, value_type: ValueType) -> ValueType {
        match (self.words, value_type) {
            (Some(allowed), ValueType::Choice { .. }) => ValueType::Choice { allowed },
            _ => value_type,
        }
    }

    /// Returns the range as keywords of JSON Schema.
    pub(crate) fn bounds(&self) -> impl Iterator<Item = (&'static str, f64)> {
        let low = self.low.map(|low| (if low.included { "minimum" } else { "exclusiveMinimum" }, low.value));
        let high =
            self.high.map(|high| (if high.included { "maximum" } else { "exclusiveMaximum" }, high.value));
        low.into_iter().chain(high)
    }

    /// Returns true if a number is in the range.
    pub fn admits(&self, number: f64) -> bool {
        let above = self.low.is_none_or(|low| number > low.value || (low.included && number == low.value));
        let below =
            self.high.is_none_or(|high| number < high.value || (high.included && number == high.value));
        above && below
    }
}

/// Writes the range, such as `>= 0 and < 1`; empty if there is none.
impl fmt::Display for Rules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(low) = self.low {
            write!(f, "{} {}", if low.included { ">=" } else { ">" }, low.value)?;
        }
        if let Some(high) = self.high {
            let and = if self.low.is_some() { " and " } else { "" };
            write!(f, "{and}{} {}", if high.included { "<=" } else { "<" }, high.value)?;
        }
        Ok(())
    }
}

/// A reader of the values of keys, which the declared sections ask for each of theirs.
pub(crate) trait KeyReader {
    /// Returns the value of `name`, or its default if it is not given or does not fit.
    fn take<T: Readable>(&mut self, name: &str, default: T, rules: Rules) -> T;

    /// Takes all keys of a section that the table of keys does not list.
    fn take_rest(&mut self, section: &str) -> Map<String, Value>;
}

/// Joins the lines of a doc comment.
pub(crate) fn joined(lines: &[&str]) -> String {
    lines.iter().map(|line| line.trim()).collect::<Vec<_>>().join(" ")
}

/// Expands to a key's full name: the section and the field's name, or the name after `as` for a word that Rust reserves.
macro_rules! key_name {
    ($section:ident.$key:ident) => {
        concat!(stringify!($section), ".", stringify!($key))
    };
    ($section:ident.$key:ident $name:literal) => {
        concat!(stringify!($section), ".", $name)
    };
}
pub(crate) use key_name;

/// Expands to a key's name within its section.
macro_rules! key_word {
    ($key:ident) => {
        stringify!($key)
    };
    ($key:ident $name:literal) => {
        $name
    };
}
pub(crate) use key_word;

/// Declares the sections of RUN.toml. A key is `name: Type = default, rules;` under its doc comment. `name as "word"` gives it
/// another name than its field. A key in an `in plan` block has no field of its own: `name in field.of.plan: Type = default,
/// rules;` is read into the run's [`Plan`](lockstep_plan::Plan).
macro_rules! sections {
    ($(
        $(#[doc = $section_doc:literal])+
        $section:ident: $Struct:ident $(and any other key in $extra:ident)?
        $({
            $( $(#[doc = $doc:literal])+ $key:ident $(as $name:literal)?: $Type:ty = $default:expr, $rules:expr; )*
        }
        $(in plan {
            $(
                $(#[doc = $plan_doc:literal])+
                $plan_key:ident $(as $plan_name:literal)? in $($field:ident).+: $PlanType:ty = $plan_default:expr, $plan_rules:expr;
            )*
        })?)+
        $(later [$($later:literal),+])?
    )+) => {
        $(
            $(#[doc = $section_doc])+
            #[derive(Debug, Clone, PartialEq)]
            pub struct $Struct {
                $($( $(#[doc = $doc])+ pub $key: $Type, )*)+
                $(
                    /// The other keys that were given; the model family checks them.
                    pub $extra: serde_json::Map<String, serde_json::Value>,
                )?
            }

            impl $Struct {
                fn read(reader: &mut impl KeyReader) -> Self {
                    Self {
                        $($( $key: reader.take(
                            key_name!($section.$key $($name)?), $default, $rules,
                        ), )*)+
                        $( $extra: reader.take_rest(stringify!($section)), )?
                    }
                }

                fn to_json(&self) -> serde_json::Map<String, Value> {
                    let mut table = serde_json::Map::new();
                    $($( table.insert(key_word!($key $($name)?).to_owned(), self.$key.to_value()); )*)+
                    $( table.extend(self.$extra.clone()); )?
                    table
                }
            }
        )+

        /// The resolved configuration of a run: every key has a value in its range, and all values are consistent.
        #[derive(Debug, Clone)]
        pub struct RunConfig {
            $( $(#[doc = $section_doc])+ pub $section: $Struct, )+
            /// The layout of a step as far as keys fix it; the model and the batch determine the rest.
            pub plan: Plan,
            pub(crate) origins: BTreeMap<String, Origin>,
        }

        impl RunConfig {
            /// Takes every known key out of `reader`; the keys that remain are unknown. The origins are not known yet.
            pub(crate) fn read(reader: &mut impl KeyReader) -> Self {
                let mut plan = Plan::default();
                $($($($( plan.$($field).+ = reader.take(
                    key_name!($section.$plan_key $($plan_name)?), $plan_default, $plan_rules,
                ); )*)?)+)+
                $( let $section = $Struct::read(reader); )+
                Self { $($section,)+ plan, origins: BTreeMap::new() }
            }

            /// Returns every key's value, by section.
            pub(crate) fn values(&self) -> Value {
                let mut sections = serde_json::Map::new();
                $( sections.insert(stringify!($section).to_owned(), Value::Object(self.$section.to_json())); )+
                for (name, value) in values_of_plan(&self.plan) {
                    let (section, key) = name.split_once('.').unwrap_or_default();
                    sections[section][key] = value;
                }
                Value::Object(sections)
            }

            /// Resets a key of the plan to its default.
            pub(crate) fn reset(&mut self, name: &str) {
                $($($($( if name == key_name!($section.$plan_key $($plan_name)?) {
                    self.plan.$($field).+ = $plan_default;
                } )*)?)+)+
            }
        }

        /// Returns the keys that a plan sets, with their values.
        pub(crate) fn values_of_plan(plan: &Plan) -> Vec<(&'static str, Value)> {
            vec![$($($($( (key_name!($section.$plan_key $($plan_name)?), plan.$($field).+.to_value()), )*)?)+)+]
        }

        /// Every implemented key, in the order of the manual.
        pub static KEYS: LazyLock<Vec<Key>> = LazyLock::new(|| vec![
            $($(
                $( Key {
                    name: key_name!($section.$key $($name)?),
                    value_type: $rules.narrowed(<$Type as Readable>::TYPE),
                    default: <$Type as Readable>::to_value(&$default),
                    rules: $rules,
                    doc: joined(&[$($doc),+]),
                    field: None,
                }, )*
                $($( Key {
                    name: key_name!($section.$plan_key $($plan_name)?),
                    value_type: $plan_rules.narrowed(<$PlanType as Readable>::TYPE),
                    default: <$PlanType as Readable>::to_value(&$plan_default),
                    rules: $plan_rules,
                    doc: joined(&[$($plan_doc),+]),
                    field: Some(stringify!($($field).+)),
                }, )*)?
            )+)+
        ]);

        /// The sections, in the order of the manual.
        pub static SECTIONS: LazyLock<Vec<Section>> = LazyLock::new(|| vec![
            $( Section { name: stringify!($section), doc: joined(&[$($section_doc),+]), later: &[$($($later),+)?] }, )+
        ]);
    };
}
pub(crate) use sections;
