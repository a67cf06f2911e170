//! The report of an analysis in plain words.

use std::fmt;

use lockstep_config::human;

use super::analysis::{Analysis, Called, Finding, Last, OperationId, Straggler};

impl fmt::Display for Analysis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hosts = self.hosts.join(", ");
        write!(f, "{} on {hosts}", human::plural(self.world_size, "rank"))?;
        let strangers = self.world_size.saturating_sub(self.known.len());
        if strangers > 0 {
            write!(f, "; {strangers} of them left no records here: add the files of their hosts")?;
        }
        writeln!(f)?;
        for message in &self.ended {
            writeln!(f, "the run ended: {message}")?;
        }
        let is_told = |lost: &Last| match &self.finding {
            Finding::Missing { missing, .. } => missing.contains(lost),
            _ => false,
        };
        if let Some(lost) = self.lost.as_ref().filter(|lost| !is_told(lost)) {
            writeln!(f, "  {lost}")?;
        }
        writeln!(f)?;
        self.finding.fmt(f)?;
        if self.agreed > 0 {
            let before = if self.finding == Finding::Agreed { "" } else { " before" };
            writeln!(f, "All ranks agree on {}{before}.", human::plural(self.agreed, "operation"))?;
        }
        if self.stragglers.len() > 1 {
            writeln!(f, "\nlateness over the last {}:", human::plural(self.compared, "operation"))?;
            writeln!(f, "{:>6} {:>12} {:>12} {:>14}", "rank", "median ms", "worst ms", "last to come")?;
            for Straggler { rank, median_ms, worst_ms, last_share } in &self.stragglers {
                let share = 100.0 * last_share;
                writeln!(f, "{rank:>6} {median_ms:>12.3} {worst_ms:>12.3} {share:>12.0} %")?;
            }
        }
        Ok(())
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Mismatch { place, differs, calls } => {
                writeln!(f, "Ranks called different things ({}) as {place}:", differs.join(", "))?;
                calls.iter().try_for_each(|call| writeln!(f, "  {call}"))
            }
            Self::Missing { place, came, missing, unknown, is_circle } => {
                let absent: Vec<usize> = missing.iter().map(|last| last.rank).collect();
                match (absent.is_empty(), unknown.is_empty()) {
                    (true, _) => {
                        writeln!(f, "Of {} it is not known whether they came to {place}:", Ranks(unknown))?
                    }
                    (false, true) => writeln!(f, "{} never came to {place}:", Ranks(&absent))?,
                    (false, false) => writeln!(
                        f,
                        "{} never came to {place}, and of {} that is not known:",
                        Ranks(&absent),
                        Ranks(unknown)
                    )?,
                }
                came.iter().try_for_each(|call| writeln!(f, "  {call}"))?;
                missing.iter().try_for_each(|last| writeln!(f, "  {last}"))?;
                if *is_circle {
                    writeln!(
                        f,
                        "They wait for each other: the ranks call their operations in different orders."
                    )?;
                }
                Ok(())
            }
            Self::Unfinished { place, what, finished, unfinished } => {
                writeln!(f, "All came to {place}, {what}, and {} did not finish it.", Ranks(unfinished))?;
                if !finished.is_empty() {
                    writeln!(f, "  {} did", Ranks(finished))?;
                }
                Ok(())
            }
            Self::Agreed => writeln!(f, "No operation on record is one on which ranks differ."),
        }
    }
}

impl fmt::Display for OperationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { sequence, group, between } = self;
        match between {
            None => write!(f, "operation {sequence} of {group}"),
            Some((from, to)) => write!(f, "message {sequence} from rank {from} to rank {to}"),
        }
    }
}

impl fmt::Display for Called {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let callers: Vec<&str> = self.callers.iter().map(String::as_str).collect();
        write!(f, "{} called {} ({})", Ranks(&self.ranks), self.what, callers.join(", "))
    }
}

impl fmt::Display for Last {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(last) = &self.operation else { return write!(f, "rank {} has called nothing", self.rank) };
        let ago = human::seconds(last.seconds_ago);
        let state = if last.is_done { "done" } else { "not done, called" };
        write!(
            f,
            "rank {} last called {}, operation {} of {} ({}): {state} {ago} before this was written",
            self.rank, last.what, last.sequence, last.group, last.caller
        )
    }
}

/// List of ranks, written as `rank 3` or `ranks 0-2, 5`.
struct Ranks<'a>(&'a [usize]);

impl fmt::Display for Ranks<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.len() == 1 { "rank " } else { "ranks " })?;
        let runs = self.0.chunk_by(|a, b| a + 1 == *b);
        for (index, run) in runs.enumerate() {
            let (first, last) = (run[0], run[run.len() - 1]);
            f.write_str(if index > 0 { ", " } else { "" })?;
            match run.len() {
                1 => write!(f, "{first}")?,
                2 => write!(f, "{first}, {last}")?,
                _ => write!(f, "{first}-{last}")?,
            }
        }
        Ok(())
    }
}
