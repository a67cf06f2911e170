//! How keys are declared: [`Key`], its [`Rules`], and the macro that makes structs, defaults, reading and the
//! list of keys out of one table (`keys`).

use std::fmt;

use serde_json::Value;

use crate::keys::RunConfig;
use crate::value::ValueType;

/// One key of RUN.toml.
#[derive(Debug, Clone)]
pub struct Key {
    /// `section.key`.
    pub name: &'static str,
    /// What it takes.
    pub value_type: ValueType,
    /// What holds when nobody sets it; `null` where that is derived (the rules say how).
    pub default: Value,
    /// Range and role.
    pub rules: Rules,
    /// What it means, as sentences.
    pub doc: String,
    /// The field of a [`Plan`](lockstep_plan::Plan) that it is read into, as a path; `None` for a key that no plan has.
    pub field: Option<&'static str>,
}

impl Key {
    /// The section it stands in.
    pub fn section(&self) -> &'static str {
        self.name.split_once('.').map_or(self.name, |(section, _)| section)
    }

    /// Its name within the section.
    pub fn key(&self) -> &'static str {
        self.name.split_once('.').map_or(self.name, |(_, key)| key)
    }
}

/// One section of RUN.toml.
#[derive(Debug, Clone)]
pub struct Section {
    /// Its name, without brackets.
    pub name: &'static str,
    /// What it is about, as sentences.
    pub doc: String,
    /// Keys that are planned and not there yet.
    pub later: &'static [Later],
}

/// A key that is planned and not there yet.
#[derive(Debug, Clone, Copy)]
pub struct Later {
    /// Its name within the section.
    pub key: &'static str,
    /// The one value, as JSON, that asks for what happens anyway; empty if there is none.
    pub accepted: &'static str,
}

impl Later {
    /// Whether `value` asks for nothing that is missing.
    pub(crate) fn accepts(&self, value: &Value) -> bool {
        serde_json::from_str::<Value>(self.accepted).is_ok_and(|accepted| accepted == *value)
    }
}

/// What a key demands of its value beyond the type, and what the value decides.
#[derive(Debug, Clone, Copy)]
pub struct Rules {
    low: Option<Bound>,
    high: Option<Bound>,
    /// What is used when the key is left out and has no fixed default.
    pub when_absent: Option<&'static str>,
    /// Whether the losses of the run depend on it (beyond rounding).
    pub defines_numbers: bool,
    /// Words of the type's choice that the key takes; `None` for all.
    words: Option<&'static [&'static str]>,
    /// Why the key has no effect in a run; `None` for a key that always has one.
    pub(crate) idle: Option<fn(&RunConfig) -> Option<Idle>>,
}

/// Why a key has no effect.
#[derive(Debug)]
pub(crate) struct Idle {
    /// What leaves nothing to do for it, to follow "has no effect with".
    pub(crate) because: String,
    /// The key that decides it.
    pub(crate) depends_on: &'static str,
}

/// A key that has no effect if `is_idle`, because of what `depends_on` says.
pub(crate) fn idle_if(is_idle: bool, depends_on: &'static str, because: impl Into<String>) -> Option<Idle> {
    is_idle.then(|| Idle { because: because.into(), depends_on })
}

#[derive(Debug, Clone, Copy)]
struct Bound {
    value: f64,
    included: bool,
}

/// No range, and no bearing on the numbers of the run.
pub(crate) const fn rules() -> Rules {
    Rules { low: None, high: None, when_absent: None, defines_numbers: false, words: None, idle: None }
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

    pub(crate) const fn idle(mut self, idle: fn(&RunConfig) -> Option<Idle>) -> Self {
        self.idle = Some(idle);
        self
    }

    /// A key's type, with the words that it takes.
    pub(crate) const fn narrowed(&self, value_type: ValueType) -> ValueType {
        match (self.words, value_type) {
            (Some(allowed), ValueType::Choice { later, .. }) => ValueType::Choice { allowed, later },
            _ => value_type,
        }
    }

    /// The range as keywords of JSON Schema.
    pub(crate) fn bounds(&self) -> impl Iterator<Item = (&'static str, f64)> {
        let low = self.low.map(|low| (if low.included { "minimum" } else { "exclusiveMinimum" }, low.value));
        let high =
            self.high.map(|high| (if high.included { "maximum" } else { "exclusiveMaximum" }, high.value));
        low.into_iter().chain(high)
    }

    /// Whether a number lies in the range.
    pub fn admits(&self, number: f64) -> bool {
        let above = self.low.is_none_or(|low| number > low.value || (low.included && number == low.value));
        let below =
            self.high.is_none_or(|high| number < high.value || (high.included && number == high.value));
        above && below
    }
}

/// The range in words, empty if there is none: `>= 0 and < 1`.
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

/// Lines of a doc comment as one text.
pub(crate) fn joined(lines: &[&str]) -> String {
    lines.iter().map(|line| line.trim()).collect::<Vec<_>>().join(" ")
}

/// A key's name: that of its field, unless another one is given (a word that Rust keeps for itself).
macro_rules! key_name {
    ($section:ident.$key:ident) => {
        concat!(stringify!($section), ".", stringify!($key))
    };
    ($section:ident.$key:ident $name:literal) => {
        concat!(stringify!($section), ".", $name)
    };
}
pub(crate) use key_name;

/// A key's name within its section.
macro_rules! key_word {
    ($key:ident) => {
        stringify!($key)
    };
    ($key:ident $name:literal) => {
        $name
    };
}
pub(crate) use key_word;

/// Declares the sections of RUN.toml. A key is `name: Type = default, rules;` under its doc comment; `name as "word"` gives it another name than
/// its field has. A key of a block `in plan` has no field of its own: `name in field.of.plan: Type = default, rules;` is read into the run's
/// [`Plan`](lockstep_plan::Plan).
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
        later [$($later:literal $(= $accepted:literal)?),*]
    )+) => {
        $(
            $(#[doc = $section_doc])+
            #[derive(Debug, Clone, PartialEq)]
            pub struct $Struct {
                $($( $(#[doc = $doc])+ pub $key: $Type, )*)+
                $(
                    /// The other keys given, for whoever knows them to check.
                    pub $extra: serde_json::Map<String, serde_json::Value>,
                )?
            }

            impl $Struct {
                fn read(reader: &mut Reader<'_>) -> Self {
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

        /// A run, resolved: every key has a value, every value is in its range and fits the others.
        #[derive(Debug, Clone)]
        pub struct RunConfig {
            $( $(#[doc = $section_doc])+ pub $section: $Struct, )+
            /// How a step is laid out, as far as keys say it: what they leave open follows from the model and the batch.
            pub plan: Plan,
            pub(crate) origins: std::collections::BTreeMap<String, Origin>,
        }

        impl RunConfig {
            /// Takes every key out of `reader`; what is left there is unknown.
            pub(crate) fn read(reader: &mut Reader<'_>) -> Self {
                let mut plan = Plan::default();
                $($($($( plan.$($field).+ = reader.take(
                    key_name!($section.$plan_key $($plan_name)?), $plan_default, $plan_rules,
                ); )*)?)+)+
                $( let $section = $Struct::read(reader); )+
                Self { $($section,)+ plan, origins: std::mem::take(&mut reader.origins) }
            }

            /// Every key's value, by section.
            pub(crate) fn values(&self) -> Value {
                let mut sections = serde_json::Map::new();
                $( sections.insert(stringify!($section).to_owned(), Value::Object(self.$section.to_json())); )+
                for (name, value) in values_of_plan(&self.plan) {
                    let (section, key) = name.split_once('.').unwrap_or_default();
                    sections[section][key] = value;
                }
                Value::Object(sections)
            }

            /// Gives a key that is read into the plan its default.
            pub(crate) fn reset(&mut self, name: &str) {
                $($($($( if name == key_name!($section.$plan_key $($plan_name)?) {
                    self.plan.$($field).+ = $plan_default;
                } )*)?)+)+
            }
        }

        /// The keys that a plan sets, with their values.
        pub(crate) fn values_of_plan(plan: &Plan) -> Vec<(&'static str, Value)> {
            vec![$($($($( (key_name!($section.$plan_key $($plan_name)?), plan.$($field).+.to_value()), )*)?)+)+]
        }

        /// Every key that works, in the order of the manual.
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
            $( Section { name: stringify!($section), doc: joined(&[$($section_doc),+]), later: &[$($crate::Later { key: $later, accepted: concat!($($accepted)?) }),*] }, )+
        ]);
    };
}
pub(crate) use sections;
