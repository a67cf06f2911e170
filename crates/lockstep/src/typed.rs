//! Tolerant parsing of the command line: flags with underscores, and suggestions for unknown arguments.

use clap::Parser;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use lockstep_config::foreign_names;

use crate::import;

/// Parses arguments, the program's name first. Flags may have underscores in place of dashes.
///
/// # Errors
/// If clap refuses them: its error, with the arguments as they were understood.
pub(crate) fn parse<Cli: Parser>(mut arguments: Vec<String>) -> Result<Cli, (clap::Error, Vec<String>)> {
    loop {
        let error = match Cli::try_parse_from(&arguments) {
            Ok(cli) => return Ok(cli),
            Err(error) => error,
        };
        let dashed = unknown(&error).and_then(|flag| with_dashes(&arguments, flag));
        match dashed {
            Some(dashed) => arguments = dashed,
            None => return Err((error, arguments)),
        }
    }
}

/// Returns the argument that clap does not know.
fn unknown(error: &clap::Error) -> Option<&str> {
    let kind = match error.kind() {
        ErrorKind::UnknownArgument => ContextKind::InvalidArg,
        ErrorKind::InvalidSubcommand => ContextKind::InvalidSubcommand,
        _ => return None,
    };
    match error.get(kind) {
        Some(ContextValue::String(typed)) => Some(typed),
        _ => None,
    }
}

/// Returns the arguments with dashes for the underscores of an unknown flag; `None` if it has none.
fn with_dashes(arguments: &[String], flag: &str) -> Option<Vec<String>> {
    let name = |argument: &str| argument.split('=').next().unwrap_or_default().to_owned();
    let flag = name(flag);
    if !flag.starts_with("--") || !flag.contains('_') {
        return None;
    }
    let index = arguments.iter().position(|argument| name(argument) == flag)?;
    let mut dashed = arguments.to_vec();
    dashed[index].replace_range(..flag.len(), &flag.replace('_', "-"));
    Some(dashed)
}

/// Returns a suggestion in place of an unknown argument; `None` if clap's own message suffices.
pub(crate) fn hint(error: &clap::Error, arguments: &[String]) -> Option<String> {
    if error.kind() == ErrorKind::InvalidValue
        && let Some(ContextValue::String(argument)) = error.get(ContextKind::InvalidArg)
        && let Some(ContextValue::String(typed)) = error.get(ContextKind::InvalidValue)
        && argument == "<FORMAT>"
    {
        return import::hint(typed);
    }
    let typed = unknown(error)?;
    if error.kind() == ErrorKind::InvalidSubcommand {
        if typed.ends_with(".toml") {
            return Some(format!("there is no command {typed}; write `lockstep train {typed}`"));
        }
        return Some(format!("there is no {typed}; {}", foreign_names::of_command(typed)?));
    }
    let has = |flag: &str| arguments.iter().any(|argument| argument.split('=').next() == Some(flag));
    let command: Vec<&str> = arguments.iter().skip(1).take(2).map(String::as_str).collect();
    let takes_settings = matches!(command[..], ["train" | "plan" | "verify", ..]);
    if typed.starts_with('-') {
        let name = typed.trim_start_matches('-');
        let setting = || foreign_names::setting_of_flag(name).filter(|_| takes_settings);
        return Some(format!("there is no {typed}; {}", setting().or_else(|| foreign_names::of_flag(name))?));
    }
    if takes_settings && typed.contains('=') {
        return Some(format!("{typed} belongs to no flag; write `--set {typed}`"));
    }
    let at = arguments.iter().position(|argument| argument == typed)?;
    if let [.., set, key] = &arguments[..at]
        && set == "--set"
        && !key.contains('=')
    {
        return Some(format!("{typed} belongs to no flag; write `--set {key}={typed}`"));
    }
    let instead = match command[..] {
        ["generate", ..] if has("--model") => format!("`--prompt \"{typed}\"`"),
        ["eval", ..] if has("--model") => format!("`--data {typed}`"),
        ["generate", ..] => format!("`lockstep generate --model {typed} --prompt TEXT`"),
        ["eval", ..] => format!("`lockstep eval --model {typed} --data FILE`"),
        ["plan", ..] => format!("`lockstep plan --model {typed}`"),
        ["checkpoint", "export"] => format!("`lockstep checkpoint export CHECKPOINT --hf {typed}`"),
        ["checkpoint", "import"] => format!("`lockstep checkpoint import MODEL --out {typed}`"),
        ["bench", "step"] => format!("`lockstep bench step --model {typed}`"),
        _ => return None,
    };
    Some(format!("{typed} belongs to no flag; write {instead}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::Cli;

    fn refused(line: &str) -> String {
        let words = line.split(' ').map(str::to_owned).collect();
        let Err((error, arguments)) = parse::<Cli>(words) else { panic!("{line} is accepted") };
        hint(&error, &arguments).unwrap_or_else(|| panic!("{line}: {error}"))
    }

    #[test]
    fn underscores_in_flags_are_dashes_everywhere() {
        for line in [
            "lockstep generate --model m --prompt p --max_new_tokens 5 --top_k=3",
            "lockstep train run.toml --nproc_per_node 2 --max_restarts=1",
            "lockstep plan --model m --global_batch 8 --seq_len=16",
        ] {
            let words = line.split(' ').map(str::to_owned).collect();
            assert!(parse::<Cli>(words).is_ok(), "{line}");
        }
    }

    #[test]
    fn what_stands_in_the_wrong_place_is_answered_with_the_command_to_type() {
        for (line, part) in [
            ("lockstep run.toml", "`lockstep train run.toml`"),
            ("lockstep generate out", "`lockstep generate --model out --prompt TEXT`"),
            ("lockstep eval out text.txt", "`lockstep eval --model out --data FILE`"),
            ("lockstep checkpoint export step hf", "`lockstep checkpoint export CHECKPOINT --hf hf`"),
            ("lockstep train run.toml --set optimizer.lr 3e-4", "`--set optimizer.lr=3e-4`"),
            ("lockstep train run.toml --model out", "--set model.path=DIR"),
            ("lockstep train run.toml train.steps=5", "`--set train.steps=5`"),
            ("lockstep train run.toml --max-length 5", "--set train.seq_len=VALUE"),
            ("lockstep generate --model out --max_length 5", "`--max-new-tokens N`"),
            ("lockstep generate --model out hi", "`--prompt \"hi\"`"),
            ("lockstep eval --model out text.txt", "`--data text.txt`"),
        ] {
            assert!(refused(line).contains(part), "{line}: {}", refused(line));
        }
    }
}
