//! Rendezvous of the launchers of a run on several machines: before every attempt, and after the last one.

use std::sync::mpsc;
use std::time::{Duration, Instant};

use lockstep_comm::{
    CommError, Deadline, JoinProblem, JoinedNodes, NodeInfo, Rejections, RendezvousEndpoint, Secret,
    join_nodes,
};

use crate::LaunchError;
use crate::interrupt::Interrupt;

/// Duration of a wait after which it is reported.
const LONG_WAIT: Duration = Duration::from_secs(5);

/// Runs `wait` and passes `text` to `tell` if it takes long.
fn told_if_long<T>(
    tell: &(dyn Fn(&str) + Sync),
    text: impl FnOnce() -> String + Send,
    wait: impl FnOnce() -> T,
) -> T {
    let (over, is_over) = mpsc::channel::<()>();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            if is_over.recv_timeout(LONG_WAIT) == Err(mpsc::RecvTimeoutError::Timeout) {
                tell(&text());
            }
        });
        let found = wait();
        drop(over);
        found
    })
}

/// Rendezvous of the launchers of a run: before every attempt, and after the last one.
#[derive(Debug)]
pub struct Rendezvous {
    host: String,
    port: u16,
    run: String,
    secret: Option<Secret>,
    /// Number of this machine, if known.
    node: Option<usize>,
    nodes: usize,
    has_met: bool,
    /// Foreign connections rejected in all meetings.
    rejections: Rejections,
}

/// Pause between two attempts to meet.
const RETRY: Duration = Duration::from_millis(100);
/// Time in which a replaced launcher may find the others still connected to its predecessor.
const REPLACEMENT: Duration = Duration::from_secs(5);
/// Interval at which a stop request is checked.
const LOOK: Duration = Duration::from_millis(20);

impl Rendezvous {
    /// Returns a rendezvous of `nodes` launchers at the address in `endpoint`, with this one as number `node` if that is known.
    /// The secret of a file or pairing code holds for all meetings.
    pub fn new(endpoint: RendezvousEndpoint, node: Option<usize>, nodes: usize) -> Self {
        let RendezvousEndpoint { host, port, run, secret, rejections, .. } = endpoint;
        Self { host, port, run, secret, node, nodes, has_met: false, rejections }
    }

    /// Meets the launchers of all other machines and exchanges cards, for at most `limit`. Gives up if `interrupt` is requested.
    /// `tell` is given what the user should know if it takes long.
    ///
    /// # Errors
    /// If the launchers do not meet in time, or if a stop is requested ([`LaunchError::Interrupted`]).
    pub fn meet(
        &mut self,
        card: NodeInfo,
        limit: Duration,
        interrupt: Option<&Interrupt>,
        tell: &(dyn Fn(&str) + Sync),
    ) -> Result<JoinedNodes, LaunchError> {
        let deadline = Deadline::after(limit);
        let begin = Instant::now();
        let (address, nodes, seconds) = (format!("{}:{}", self.host, self.port), self.nodes, limit.as_secs());
        let rejections = self.rejections.clone();
        let told = move || {
            let strangers = if rejections.count() > 0 { format!("; {rejections}") } else { String::new() };
            format!("waiting for {nodes} machines at {address}, {seconds} s at most{strangers}")
        };
        let met = told_if_long(tell, told, || {
            loop {
                let problem = match self.meet_once(card, deadline, interrupt) {
                    Ok(met) => return Ok(met),
                    Err(Unmet::Interrupted) => return Err(LaunchError::Interrupted),
                    Err(Unmet::Refused(problem)) => problem,
                };
                // The others may be about to enter this rendezvous, or wait for one that was replaced.
                let is_passing = match &problem {
                    CommError::Join(JoinProblem::Address { .. }) => self.has_met,
                    CommError::Join(
                        JoinProblem::Connection(_) | JoinProblem::HungUp | JoinProblem::Duplicate { .. },
                    ) => card.max_restarts > 0 && (self.has_met || begin.elapsed() < REPLACEMENT),
                    _ => false,
                };
                if !is_passing || deadline.remaining() <= RETRY {
                    return Err(problem.into());
                }
                std::thread::sleep(RETRY);
            }
        })?;
        self.has_met = true;
        self.node = Some(met.placement.node);
        Ok(met)
    }

    /// Attempts to meet once, in a thread of its own, so that a stop request is noticed.
    fn meet_once(
        &self,
        card: NodeInfo,
        deadline: Deadline,
        interrupt: Option<&Interrupt>,
    ) -> Result<JoinedNodes, Unmet> {
        let (host, run, secret) = (self.host.clone(), self.run.clone(), self.secret.clone());
        let rejections = self.rejections.clone();
        let endpoint = RendezvousEndpoint {
            host,
            port: self.port,
            run,
            secret,
            rejections,
            ..RendezvousEndpoint::default()
        };
        let (node, nodes) = (self.node, self.nodes);
        let (sender, receiver) = mpsc::channel();
        let talk = move || {
            // After a stop request nobody receives the result.
            let _ = sender.send(join_nodes(endpoint, node, nodes, card, deadline));
        };
        let spawned = std::thread::Builder::new().name("lockstep-meeting".to_owned()).spawn(talk);
        spawned.map_err(|source| Unmet::Refused(CommError::Io { what: "start a thread", source }))?;
        loop {
            match receiver.recv_timeout(LOOK) {
                Ok(met) => return met.map_err(Unmet::Refused),
                Err(mpsc::RecvTimeoutError::Disconnected) => {
                    return Err(Unmet::Refused(CommError::Join(JoinProblem::HungUp)));
                }
                Err(mpsc::RecvTimeoutError::Timeout) => {}
            }
            if interrupt.is_some_and(Interrupt::is_requested) {
                return Err(Unmet::Interrupted);
            }
        }
    }
}

/// Reason why launchers did not meet.
enum Unmet {
    /// A stop was requested.
    Interrupted,
    /// The rendezvous failed with this error.
    Refused(CommError),
}
