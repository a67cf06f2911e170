//! A conversation on the terminal.

use std::io::BufRead;
use std::process::ExitCode;

use super::writer::{Job, Writer};
use crate::exit::Failure;
use crate::output::{note, piece, say, warning};

/// Runs a conversation on the terminal until its input ends.
pub(super) fn converse(writer: &Writer<'_>, system: Option<&str>) -> Result<ExitCode, Failure> {
    note!("/reset forgets the conversation, /exit or Ctrl-D ends it");
    let opening: Vec<_> = system.iter().map(|&text| ("system".to_owned(), text.to_owned())).collect();
    let (mut messages, mut seed) = (opening.clone(), writer.sampling.seed);
    let mut input = std::io::stdin().lock();
    loop {
        piece("> ");
        let mut line = String::new();
        if input.read_line(&mut line).unwrap_or(0) == 0 {
            say!("");
            return Ok(ExitCode::SUCCESS);
        }
        match line.trim() {
            "" => continue,
            "/exit" | "/quit" => return Ok(ExitCode::SUCCESS),
            "/reset" => messages.clone_from(&opening),
            question => {
                messages.push(("user".to_owned(), question.to_owned()));
                match answer(writer, &messages, seed) {
                    Ok(text) => messages.push(("assistant".to_owned(), text.trim().to_owned())),
                    // A question that does not fit does not end the conversation.
                    Err(Failure { message, .. }) => {
                        messages.pop();
                        warning(&format!("{message}; /reset begins anew"));
                    }
                }
                seed = seed.wrapping_add(1);
                say!("");
            }
        }
    }
}

/// Generates and shows the answer to the last of `messages`.
fn answer(writer: &Writer<'_>, messages: &[(String, String)], seed: u64) -> Result<String, Failure> {
    let job = Job { ids: writer.tokenizer.encode_chat(messages)?, seed };
    let written = writer.write(&[job], 0..1, |_, text| {
        piece(text.unwrap_or(""));
        Ok(())
    })?;
    Ok(written.into_iter().map(|written| written.text).collect())
}
