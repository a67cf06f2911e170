//! A run as a sequence of attempts: its ranks are started, watched to their end, and restarted from the newest checkpoint after a
//! failure.
//!
//! On several machines the launchers meet before every attempt and after the last one. They exchange their state ([`NodeInfo`]), so
//! that all make the same attempt, or all end.

use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use lockstep_comm::{JoinedNodes, LossCause, NodeInfo};
use lockstep_config::plan::check;
use lockstep_config::{ResolvedModel, Transport};
use lockstep_launch::MEETING_LIMIT;
use lockstep_launch::interrupt::Interrupt;
use lockstep_launch::rendezvous::Rendezvous;
use lockstep_launch::restarts::{Policy, Restarts, Verdict, jitter};
use lockstep_observe::report;
use lockstep_planner::Forecast;
use serde_json::json;

use super::launcher::Launcher;
use crate::exit::{self, Failure, INTERRUPTED, PEER_LOST};
use crate::output::{field, note, warning};
use crate::ranks;

/// Time that an ending launcher waits for the others, to inform them.
const FAREWELL: Duration = Duration::from_secs(10);
/// Time that an ending launcher waits if there are no restarts and nobody waits for it: enough to learn how a remote rank ended.
const BRIEF_FAREWELL: Duration = Duration::from_millis(1500);
/// File with a run's restarts, in its metrics directory.
const RECORDS: &str = "restarts.jsonl";

/// Attempts of one launcher.
struct Attempts<'a> {
    launcher: &'a Launcher<'a>,
    model: &'a ResolvedModel,
    /// Rendezvous of the launchers of several machines.
    rendezvous: Option<Rendezvous>,
    policy: Policy,
    restarts: Restarts,
    /// Number of the next attempt, from 0.
    attempt: usize,
    /// Rank of this machine whose loss ended the last attempt.
    lost: Option<(usize, LossCause)>,
    /// Number of this machine.
    node: usize,
}

/// Starts this command once per rank of this machine, if there are several and no other launcher has started them; restarts
/// them after failures. `None` if this process is to be the only rank.
pub(super) fn run(launcher: &Launcher<'_>, is_started: bool) -> Result<Option<ExitCode>, Failure> {
    let Launcher { arguments, launching, config, plan, .. } = *launcher;
    // Errors are reported once, before any rank is started.
    if let Some(plan) = plan {
        plan.check(config)?;
    }
    let (_, model) = check(config)?;
    if plan.is_some() {
        ranks::warn_if_outdated(plan, &Forecast::of(config, &model)?);
    }
    // mpirun has started the ranks, or there is only one.
    if config.parallel.transport == Transport::Mpi {
        return Ok(None);
    }
    let rendezvous = arguments.nodes.rendezvous(launching)?;
    Attempts::new(launcher, &model, rendezvous).run(is_started)
}

impl<'a> Attempts<'a> {
    /// Returns the attempts of `launcher` before the first one.
    fn new(launcher: &'a Launcher<'a>, model: &'a ResolvedModel, rendezvous: Option<Rendezvous>) -> Self {
        let policy = launcher.policy();
        let restarts = Restarts::new(policy, newest_step(launcher));
        Self { launcher, model, rendezvous, policy, restarts, attempt: 0, lost: None, node: 0 }
    }

    /// Runs attempts until one succeeds or none may follow; `None` if this process is to be the only rank.
    fn run(mut self, is_started: bool) -> Result<Option<ExitCode>, Failure> {
        let mut interrupt = None;
        // Failure that caused the next attempt.
        let mut mended: Option<Failure> = None;
        loop {
            let placement = match self.meet(interrupt.as_ref(), mended.as_ref()) {
                Ok(met) => met.map(|met| met.placement),
                Err(failure) => return Err(self.resumable(failure)),
            };
            let start = self.launcher.start(self.model, is_started, self.attempt, placement);
            let Some(start) = start.map_err(|failure| self.farewell(failure))? else { return Ok(None) };
            let interrupt = match &interrupt {
                Some(interrupt) => interrupt,
                None => {
                    self.launcher.launching.without_effect().iter().for_each(|text| note!("{text}"));
                    interrupt.insert(Interrupt::on_signals()?)
                }
            };
            let begin = Instant::now();
            self.lost = None;
            let failure = match ranks::attempt(start, interrupt, &mut self.lost) {
                Ok(code) => {
                    if self.policy.max_restarts > 0 {
                        self.announce_end(if code == ExitCode::SUCCESS { 0 } else { INTERRUPTED });
                    }
                    return Ok(Some(code));
                }
                Err(failure) => failure,
            };
            if !failure.may_restart() || interrupt.is_requested() {
                return Err(self.ended(failure));
            }
            match self.restarts.after_failure(begin.elapsed(), self.newest_step(), jitter()) {
                Verdict::Again(pause) => {
                    self.attempt += 1;
                    self.say_restart(&failure);
                    if !interrupt.sleeps(pause) {
                        return Err(self.ended(ranks::interrupted()));
                    }
                    mended = Some(failure);
                }
                Verdict::UsedUp if self.policy.max_restarts == 0 => return Err(self.ended(failure)),
                Verdict::UsedUp => {
                    let used = format!("all {} restarts are used up", self.policy.max_restarts);
                    return Err(self.ended(with(failure, &used)));
                }
                Verdict::Futile(number) => {
                    let loops = format!(
                        "{number} restarts in a row (elastic.max_futile_restarts) have brought no new checkpoint, so the run gives up"
                    );
                    return Err(self.ended(with(failure, &loops)));
                }
            }
        }
    }

    /// Meets the launchers of the other machines for the next attempt, if there are any.
    fn meet(
        &mut self,
        interrupt: Option<&Interrupt>,
        mended: Option<&Failure>,
    ) -> Result<Option<JoinedNodes>, Failure> {
        let node_info = self.node_info(None);
        let Some(rendezvous) = &mut self.rendezvous else { return Ok(None) };
        let launching = self.launcher.launching;
        let rejoin = Duration::from_secs_f64(self.launcher.config.elastic.rejoin_timeout_s);
        let limit = match mended {
            Some(_) => launching.limit.unwrap_or(rejoin),
            None => launching.limit.unwrap_or(MEETING_LIMIT),
        };
        let met =
            rendezvous.meet(node_info, limit, interrupt, &say).map_err(Failure::from).map_err(|unmet| {
                match mended {
                    // The run ends because of the loss, not because a machine does not return.
                    Some(failure) if unmet.code != INTERRUPTED => {
                        Failure { code: PEER_LOST, ..with(failure.clone(), &unmet.message) }
                    }
                    _ => unmet,
                }
            })?;
        self.node = met.placement.node;
        let restarts = |node_info: &NodeInfo| node_info.max_restarts;
        if let Some(node) =
            met.nodes.iter().position(|node_info| restarts(node_info) != restarts(&met.nodes[0]))
        {
            return Err(Failure::configuration(format!(
                "node {node} may make {} restarts and node 0 {} (--max-restarts, elastic.max_restarts): give all machines the same",
                restarts(&met.nodes[node]),
                restarts(&met.nodes[0])
            )));
        }
        if let Some(node) = met.nodes.iter().position(|node_info| node_info.ends.is_some()) {
            return Err(ended_elsewhere(node, &met.nodes, mended));
        }
        if let Some(failure) = mended {
            let told = told_elsewhere(failure.clone(), &met.nodes);
            if told.message != failure.message {
                warning(&told.message);
            }
        }
        self.attempt = met.attempt;
        Ok(Some(met))
    }

    /// Returns what this launcher sends to the rendezvous of the machines; `ends` is its exit code if it starts no further attempt.
    fn node_info(&self, ends: Option<u8>) -> NodeInfo {
        NodeInfo {
            attempt: self.attempt,
            max_restarts: self.policy.max_restarts,
            ends,
            lost: self.lost,
            ..NodeInfo::first(self.launcher.ranks_here())
        }
    }

    /// Tells the other launchers that this one ends with `code`, since they may wait for it. Returns their states if they met.
    fn announce_end(&mut self, code: u8) -> Option<JoinedNodes> {
        let node_info = self.node_info(Some(code));
        let limit = if self.policy.max_restarts > 0 { FAREWELL } else { BRIEF_FAREWELL };
        // A launcher that does not arrive notices at its own deadline.
        self.rendezvous.as_mut()?.meet(node_info, limit, None, &say).ok()
    }

    /// Tells the other launchers of `failure` and returns it.
    fn farewell(&mut self, failure: Failure) -> Failure {
        self.announce_end(failure.code);
        failure
    }

    /// Returns the final failure: completed by other launchers' knowledge and a hint on resuming. Writes the report if the first
    /// rank was lost.
    fn ended(&mut self, failure: Failure) -> Failure {
        let failure = match self.announce_end(failure.code) {
            Some(met) => told_elsewhere(failure, &met.nodes),
            None => failure,
        };
        if let Some((0, cause)) = self.lost {
            self.leave_report(cause);
        }
        self.resumable(failure)
    }

    /// Writes the report of a run whose first rank could not.
    fn leave_report(&self, cause: LossCause) {
        let metrics = &self.launcher.config.metrics;
        // A first rank that ended by an exit has written it already.
        if !metrics.jsonl || matches!(cause, LossCause::Exit(_)) {
            return;
        }
        if let Ok(path) = report::write(&metrics.dir, None) {
            field("ended", &format!("rank 0 {cause}; what it wrote down before is in the report"));
            field("report", &path.display().to_string());
        }
    }

    /// Returns the step of the newest checkpoint; machines other than the first need not see checkpoints.
    fn newest_step(&self) -> Option<u64> {
        newest_step(self.launcher).or((self.node > 0).then_some(self.attempt as u64))
    }

    /// Reports why ranks are restarted and appends it to the records.
    fn say_restart(&self, failure: &Failure) {
        let message = failure.cause();
        let (number, most) = (self.restarts.outstanding(), self.policy.max_restarts);
        let from = newest_step(self.launcher);
        let origin = match (from, self.node) {
            (Some(step), _) => format!("goes on from the checkpoint of step {step}"),
            (None, 0) => "begins anew, for no checkpoint was saved".to_owned(),
            (None, _) => "goes on from the last checkpoint".to_owned(),
        };
        warning(&format!("{message}; restart {number} of {most} {origin}"));
        let time = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64());
        let row = json!({
            "time": time, "attempt": self.attempt, "why": message, "code": failure.code, "from_step": from,
            "lost_rank": self.lost.map(|(rank, _)| rank),
        });
        let metrics = &self.launcher.config.metrics;
        if self.node == 0 && metrics.jsonl {
            let file = File::options().create(true).append(true).open(metrics.dir.join(RECORDS));
            // The run goes on if this record cannot be written.
            let _ = file.and_then(|mut file| file.write_all(format!("{row}\n").as_bytes()));
        }
    }

    /// Adds a hint on resuming to a failure that was a loss or an interruption.
    fn resumable(&self, failure: Failure) -> Failure {
        let how = match newest(self.launcher) {
            Some((_, path)) => format!("the same command goes on from {}", path.display()),
            None => "no checkpoint was saved, so that the same command begins anew".to_owned(),
        };
        match failure {
            Failure { message, code: code @ (PEER_LOST | INTERRUPTED) } if !message.is_empty() => {
                with(Failure { message, code }, &how)
            }
            failure => failure,
        }
    }
}

/// Prints what the launcher tells while it waits for others.
fn say(text: &str) {
    note!("{text}");
}

/// Returns step and path of the newest checkpoint, in the directory of the run or its fallback.
fn newest(launcher: &Launcher<'_>) -> Option<(u64, PathBuf)> {
    let dirs = launcher.config.checkpoint_dirs().into_iter();
    let saved = dirs.filter_map(|dir| lockstep_checkpoint::list(dir).ok()?.pop());
    saved.map(|saved| (saved.step, saved.path)).max_by_key(|(step, _)| *step)
}

/// Returns the step of the newest checkpoint.
fn newest_step(launcher: &Launcher<'_>) -> Option<u64> {
    newest(launcher).map(|(step, _)| step)
}

/// Appends a sentence to the message of `failure`; if the message is empty, the sentence replaces it.
fn with(failure: Failure, sentence: &str) -> Failure {
    let Failure { message, code } = failure;
    let message = if message.is_empty() { sentence.to_owned() } else { format!("{message}; {sentence}") };
    Failure { message, code }
}

/// Returns the failure of this machine if node `node` makes no further attempt.
fn ended_elsewhere(node: usize, nodes: &[NodeInfo], mended: Option<&Failure>) -> Failure {
    let code = nodes[node].ends.unwrap_or(exit::FAILED);
    let sentence = match code {
        0 => format!("node {node} has done all its steps and ended, so that no restart follows"),
        code => format!("node {node} ended with exit code {code}, so that no restart follows"),
    };
    let own = mended.cloned().unwrap_or(Failure { message: String::new(), code: PEER_LOST });
    // An interrupted run is interrupted on every machine.
    let code = if code == INTERRUPTED { INTERRUPTED } else { own.code };
    Failure { code, ..with(own, &sentence) }
}

/// Completes `failure` with the causes of losses that only launchers of other machines know.
fn told_elsewhere(failure: Failure, nodes: &[NodeInfo]) -> Failure {
    let told = |message: String, (rank, cause): (usize, LossCause)| {
        let vague = format!("rank {rank} was lost: it {}", LossCause::Disconnected);
        message.replace(&vague, &format!("rank {rank} was lost: it {cause}"))
    };
    let message = nodes.iter().filter_map(|node_info| node_info.lost).fold(failure.message, told);
    Failure { message, ..failure }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vague_cause_gives_way_to_that_of_the_machine_of_the_rank() {
        let own = NodeInfo::first(2);
        let theirs = NodeInfo { lost: Some((3, LossCause::OutOfMemory)), ..own };
        let failure = Failure {
            message: format!("rank 3 was lost: it {}; x", LossCause::Disconnected),
            code: PEER_LOST,
        };
        let told = told_elsewhere(failure.clone(), &[own, theirs]);
        assert_eq!(told.message, "rank 3 was lost: it was killed by the out-of-memory killer (signal 9); x");
        assert_eq!(told_elsewhere(failure.clone(), &[own, own]).message, failure.message);
    }
}
