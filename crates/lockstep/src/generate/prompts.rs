//! The prompts of `lockstep generate`: from the command line, a file or standard input.

use std::io::{IsTerminal, Read};
use std::path::Path;

use lockstep_engine::Ranks;

use crate::exit::{CORRUPT_INPUT, Failure};
use crate::inference_ranks::shared_text;

/// Returns the prompts that the command line names, on all ranks. The first one reads standard input.
pub(super) fn prompts(
    ranks: &Ranks,
    given: Option<&str>,
    file: Option<&Path>,
) -> Result<Vec<String>, Failure> {
    if let Some(file) = file {
        return prompts_of(file);
    }
    match given {
        Some(prompt) if prompt != "-" => Ok(vec![prompt.to_owned()]),
        asked => Ok(vec![shared_text(ranks, || standard_input(asked))?]),
    }
}

/// Returns the text on standard input; `asked` is the prompt of the command line.
fn standard_input(asked: Option<&str>) -> Result<String, Failure> {
    let nothing = || {
        Failure::configuration(
            "there is no prompt: give --prompt TEXT, --prompts FILE or text on standard input; --chat on a \
                     terminal begins a conversation",
        )
    };
    if asked.is_none() && std::io::stdin().is_terminal() {
        return Err(nothing());
    }
    let mut text = String::new();
    std::io::stdin().read_to_string(&mut text).map_err(|error| Failure {
        message: format!("standard input: {error}; a prompt is UTF-8 text"),
        code: CORRUPT_INPUT,
    })?;
    let text = text.strip_suffix('\n').unwrap_or(&text);
    if text.is_empty() { Err(nothing()) } else { Ok(text.to_owned()) }
}

/// Returns the lines of a file that are not empty.
fn prompts_of(file: &Path) -> Result<Vec<String>, Failure> {
    let shown = file.display();
    let text = std::fs::read(file)
        .map_err(|error| Failure::configuration(format!("cannot read --prompts {shown}: {error}")))?;
    let text = String::from_utf8(text).map_err(|error| Failure {
        message: format!("--prompts {shown} is not UTF-8 text: {error}"),
        code: CORRUPT_INPUT,
    })?;
    let prompts: Vec<String> = text.lines().filter(|line| !line.is_empty()).map(str::to_owned).collect();
    if prompts.is_empty() {
        let problem = format!("--prompts {shown} has no prompt; a prompt is a line that is not empty");
        return Err(Failure::configuration(problem));
    }
    Ok(prompts)
}
