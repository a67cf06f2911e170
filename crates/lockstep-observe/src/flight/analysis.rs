//! Analysis of the flight records of all ranks: the first operation on which ranks differ, the culprits, and the stragglers.
//!
//! Operations of a group have the same numbers on all its ranks, so records are joined by group and number, as in PyTorch's
//! `fr_trace`. If ranks are missing in several groups, the finding is the group whose missing ranks wait for nobody themselves. A
//! pure function of the records.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use super::dump::{Dump, Group, Operation};

/// Number of recent operations over which lateness is computed.
const RECENT: usize = 256;

/// Result of the analysis.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Analysis {
    /// Hosts that wrote the records.
    pub hosts: Vec<String>,
    /// Number of ranks of the run.
    pub world_size: usize,
    /// Ranks whose records are available.
    pub known: Vec<usize>,
    /// Reason why the run ended, as each host reports it.
    pub ended: Vec<String>,
    /// The rank that the run has lost, with its last operation.
    pub lost: Option<Last>,
    /// Ranks that caused the finding, as far as known.
    pub culprits: Vec<usize>,
    /// First operation on which ranks differ.
    pub finding: Finding,
    /// Number of operations on which all ranks agree.
    pub agreed: usize,
    /// Number of operations over which lateness was computed.
    pub compared: usize,
    /// Ranks by median lateness, the latest first.
    pub stragglers: Vec<Straggler>,
}

/// Kind of difference between ranks.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Finding {
    /// Ranks called different operations.
    Mismatch {
        /// Operation on which they differ.
        place: OperationId,
        /// The properties that differ: `elements`, `dtype`, ...
        differs: Vec<&'static str>,
        /// The calls and their ranks, the most frequent first.
        calls: Vec<Called>,
    },
    /// Some ranks have not called an operation for which others wait.
    Missing {
        /// Operation that some have not called.
        place: OperationId,
        /// The ranks that have called it.
        came: Vec<Called>,
        /// The ranks that have not.
        missing: Vec<Last>,
        /// Ranks of which this is unknown.
        unknown: Vec<usize>,
        /// True if every missing rank waits in another operation itself.
        is_circle: bool,
    },
    /// All ranks have called an operation, and some have not completed their part.
    Unfinished {
        /// Operation that some have not completed.
        place: OperationId,
        /// Description of the call.
        what: String,
        /// Ranks that have completed it.
        finished: Vec<usize>,
        /// Ranks that have not.
        unfinished: Vec<usize>,
    },
    /// All ranks agree.
    Agreed,
}

/// Identity of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct OperationId {
    /// Sequence number in its group.
    pub sequence: u32,
    /// Group of the operation.
    pub group: Group,
    /// Sender and receiver of a `send` or `receive`.
    pub between: Option<(usize, usize)>,
}

/// Ranks that made the same call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Called {
    /// Description of the call.
    pub what: String,
    /// Ranks that made it.
    pub ranks: Vec<usize>,
    /// Source locations of the call.
    pub callers: BTreeSet<String>,
}

/// A rank with its last operation.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Last {
    /// Number of the rank.
    pub rank: usize,
    /// Its last operation, if it has called any.
    pub operation: Option<LastCall>,
}

/// The last call of a rank.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LastCall {
    /// Description of the call.
    pub what: String,
    /// Sequence number in its group.
    pub sequence: u32,
    /// Group of the operation.
    pub group: Group,
    /// Source location of the call.
    pub caller: String,
    /// True if the operation was completed.
    pub is_done: bool,
    /// Seconds from its completion, or else its call, to the writing of the records.
    pub seconds_ago: f64,
}

/// Lateness of a rank at collectives, relative to the first rank to arrive.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Straggler {
    /// Number of the rank.
    pub rank: usize,
    /// Median lateness in milliseconds.
    pub median_ms: f64,
    /// Maximum lateness in milliseconds.
    pub worst_ms: f64,
    /// Fraction of operations at which this rank arrived last.
    pub last_share: f64,
}

/// Records of one rank and the time of their writing.
#[derive(Clone, Copy)]
struct Rank<'a> {
    operations: &'a [Operation],
    written_us: u64,
}

/// The records of one operation, by rank.
type Meeting<'a> = BTreeMap<usize, &'a Operation>;

/// A possible finding, with the facts that rank it among others.
struct Candidate {
    finding: Finding,
    culprits: Vec<usize>,
    /// Ranks that wait in the operation.
    waiting: Vec<usize>,
    /// Time at which the first rank called the operation.
    since_us: u64,
}

/// Analyses the records of one run. No two dumps may hold the same rank, and all must have one world size.
pub fn analyse(dumps: &[Dump]) -> Analysis {
    let ranks: BTreeMap<usize, Rank<'_>> = dumps
        .iter()
        .flat_map(|dump| {
            let written_us = dump.written_us;
            dump.ranks.iter().map(move |rank| (rank.rank, Rank { operations: &rank.operations, written_us }))
        })
        .collect();
    let world_size = dumps.iter().map(|dump| dump.world_size).max().unwrap_or(0);
    let records = Records::new(ranks, world_size);
    let mut search = Search { records: &records, agreed: 0, candidates: Vec::new() };
    for (group, meetings) in &records.groups {
        search.group(*group, meetings);
    }
    search.messages();
    let agreed = search.agreed;
    let (finding, found) = first(search.candidates);
    let lost = dumps.iter().find_map(|dump| dump.ended.as_ref()?.lost);
    let mut ended: Vec<String> = Vec::new();
    for message in dumps.iter().filter_map(|dump| Some(&dump.ended.as_ref()?.message)) {
        if !ended.contains(message) {
            ended.push(message.clone());
        }
    }
    let (compared, stragglers) = records.stragglers();
    Analysis {
        hosts: dumps.iter().map(|dump| dump.host.clone()).collect::<BTreeSet<_>>().into_iter().collect(),
        world_size,
        known: records.ranks.keys().copied().collect(),
        ended,
        lost: lost.map(|rank| records.last(rank)),
        culprits: lost.map_or(found, |rank| vec![rank]),
        finding,
        agreed,
        compared,
        stragglers,
    }
}

/// Returns the finding that explains the others.
fn first(mut candidates: Vec<Candidate>) -> (Finding, Vec<usize>) {
    let waiting: BTreeSet<usize> =
        candidates.iter().flat_map(|found| found.waiting.iter().copied()).collect();
    for candidate in &mut candidates {
        if let Finding::Missing { missing, is_circle, .. } = &mut candidate.finding {
            let idle = missing.iter().map(|last| last.rank).filter(|rank| !waiting.contains(rank));
            let idle: Vec<usize> = idle.collect();
            *is_circle = idle.is_empty() && !missing.is_empty();
            if !*is_circle {
                candidate.culprits = idle;
            }
        }
    }
    let order = |candidate: &Candidate| {
        let class = match &candidate.finding {
            Finding::Mismatch { .. } => 0,
            Finding::Missing { is_circle: false, .. } => 1,
            Finding::Missing { .. } => 2,
            Finding::Unfinished { .. } | Finding::Agreed => 3,
        };
        (class, candidate.since_us)
    };
    let found = candidates.into_iter().min_by_key(order);
    found.map_or((Finding::Agreed, Vec::new()), |candidate| (candidate.finding, candidate.culprits))
}

struct Records<'a> {
    ranks: BTreeMap<usize, Rank<'a>>,
    world_size: usize,
    /// Collectives by group and sequence number.
    groups: BTreeMap<Group, BTreeMap<u32, Meeting<'a>>>,
}

impl<'a> Records<'a> {
    fn new(ranks: BTreeMap<usize, Rank<'a>>, world_size: usize) -> Self {
        let mut groups: BTreeMap<Group, BTreeMap<u32, Meeting<'_>>> = BTreeMap::new();
        for (rank, records) in &ranks {
            for operation in records.operations.iter().filter(|operation| !operation.is_message()) {
                let meetings = groups.entry(operation.group).or_default();
                meetings.entry(operation.sequence).or_default().insert(*rank, operation);
            }
        }
        Self { ranks, world_size, groups }
    }

    /// Returns true if the recorder has overwritten the first calls of the rank.
    fn has_forgotten(&self, rank: usize) -> bool {
        self.ranks[&rank].operations.first().is_some_and(|first| first.number > 0)
    }

    fn last(&self, rank: usize) -> Last {
        let last = self.ranks.get(&rank).and_then(|records| Some((records.operations.last()?, records)));
        let operation = last.map(|(operation, records)| {
            let moment = operation.done_us.unwrap_or(operation.posted_us);
            LastCall {
                what: operation.what.clone(),
                sequence: operation.sequence,
                group: operation.group,
                caller: operation.caller.clone(),
                is_done: operation.done_us.is_some(),
                seconds_ago: records.written_us.saturating_sub(moment) as f64 / 1e6,
            }
        });
        Last { rank, operation }
    }

    /// Returns the members of a group whose records show whether they arrived, and the possible members without such records.
    fn members(&self, group: Group) -> (BTreeSet<usize>, Vec<usize>) {
        let in_group = |rank: &usize, is_it: &dyn Fn(Group) -> bool| {
            self.ranks[rank]
                .operations
                .iter()
                .any(|operation| !operation.is_message() && is_it(operation.group))
        };
        let seen: BTreeSet<usize> =
            self.ranks.keys().copied().filter(|rank| in_group(rank, &|other| other == group)).collect();
        let size = group.size as usize;
        if seen.len() >= size {
            return (seen, Vec::new());
        }
        // Candidates for the other members: within one partition a rank is in at most one group.
        let is_free = |rank: &usize| {
            !self.ranks.contains_key(rank) || !in_group(rank, &|other| other.index == group.index)
        };
        let others: Vec<usize> =
            (0..self.world_size).filter(|rank| !seen.contains(rank)).filter(is_free).collect();
        let is_silent = |rank: &usize| self.ranks.contains_key(rank) && !self.has_forgotten(*rank);
        if seen.len() + others.len() > size {
            return (seen, others);
        }
        let (silent, unknown): (Vec<usize>, Vec<usize>) = others.into_iter().partition(is_silent);
        (seen.into_iter().chain(silent).collect(), unknown)
    }

    /// Returns the lateness of ranks at the last operations that their whole group called, and the number of these operations.
    fn stragglers(&self) -> (usize, Vec<Straggler>) {
        let is_whole =
            |group: &Group, meeting: &Meeting<'_>| group.size > 1 && meeting.len() == group.size as usize;
        let mut whole: Vec<(u64, &Meeting<'_>)> = self
            .groups
            .iter()
            .flat_map(|(group, meetings)| meetings.values().filter(move |meeting| is_whole(group, meeting)))
            .filter_map(|meeting| Some((first_us(meeting)?, meeting)))
            .collect();
        whole.sort_by_key(|(since_us, _)| *since_us);
        let recent = &whole[whole.len().saturating_sub(RECENT)..];
        let mut lateness_us: BTreeMap<usize, (Vec<u64>, usize)> = BTreeMap::new();
        for (since_us, meeting) in recent {
            let latest = meeting.values().map(|operation| operation.posted_us).max();
            for (rank, operation) in *meeting {
                let (lateness, times_last) = lateness_us.entry(*rank).or_default();
                lateness.push(operation.posted_us - since_us);
                *times_last +=
                    usize::from(operation.posted_us > *since_us && latest == Some(operation.posted_us));
            }
        }
        let mut stragglers: Vec<Straggler> = lateness_us
            .into_iter()
            .map(|(rank, (mut lateness, times_last))| {
                lateness.sort_unstable();
                Straggler {
                    rank,
                    median_ms: lateness[lateness.len() / 2] as f64 / 1e3,
                    worst_ms: lateness.last().map_or(0.0, |worst| *worst as f64 / 1e3),
                    last_share: times_last as f64 / lateness.len() as f64,
                }
            })
            .collect();
        let by = |straggler: &Straggler| (straggler.median_ms, straggler.last_share);
        stragglers.sort_by(|a, b| by(b).partial_cmp(&by(a)).unwrap_or(std::cmp::Ordering::Equal));
        (recent.len(), stragglers)
    }
}

struct Search<'a> {
    records: &'a Records<'a>,
    agreed: usize,
    candidates: Vec<Candidate>,
}

impl Search<'_> {
    /// Searches the operations of a group up to the first on which its ranks differ.
    fn group(&mut self, group: Group, meetings: &BTreeMap<u32, Meeting<'_>>) {
        let (known, unknown) = self.records.members(group);
        // Begins at the first operation that is still in every rank's record.
        let forgotten = known.iter().filter(|rank| self.records.has_forgotten(**rank));
        let oldest = forgotten.filter_map(|rank| {
            meetings.iter().find(|(_, meeting)| meeting.contains_key(rank)).map(|(sequence, _)| *sequence)
        });
        let from = oldest.max().unwrap_or(0);
        let mut unfinished = None;
        for (&sequence, meeting) in meetings.range(from..) {
            let place = OperationId { sequence, group, between: None };
            let since_us = first_us(meeting).unwrap_or(0);
            let waiting =
                || meeting.iter().filter(|(_, call)| call.done_us.is_none()).map(|(rank, _)| *rank).collect();
            if let Some((finding, culprits)) = mismatch(place, meeting) {
                self.candidates.push(Candidate { finding, culprits, waiting: waiting(), since_us });
                return;
            }
            let absent: Vec<usize> =
                known.iter().filter(|rank| !meeting.contains_key(rank)).copied().collect();
            let has_passed =
                |rank: &usize| meetings.range(sequence + 1..).any(|(_, later)| later.contains_key(rank));
            if absent.iter().any(has_passed) {
                // The record was being written while it was read.
                continue;
            }
            let is_met = meeting.values().any(|call| call.met_us.is_some() || call.done_us.is_some());
            if !absent.is_empty() || !unknown.is_empty() && !is_met {
                let missing = absent.iter().map(|rank| self.records.last(*rank)).collect();
                let unknown = if is_met { Vec::new() } else { unknown };
                let came = called(meeting);
                let finding = Finding::Missing { place, came, missing, unknown, is_circle: false };
                self.candidates.push(Candidate { finding, culprits: absent, waiting: waiting(), since_us });
                return;
            }
            if unfinished.is_none() && meeting.values().any(|call| call.done_us.is_none()) {
                unfinished = Some((place, meeting, since_us));
            }
            self.agreed += usize::from(unfinished.is_none());
        }
        if let Some((place, meeting, since_us)) = unfinished {
            let (finished, unfinished): (Vec<_>, Vec<_>) = meeting
                .iter()
                .map(|(rank, call)| (*rank, call.done_us.is_some()))
                .partition(|(_, is_done)| *is_done);
            let ranks = |part: Vec<(usize, bool)>| part.into_iter().map(|(rank, _)| rank).collect::<Vec<_>>();
            let (finished, unfinished) = (ranks(finished), ranks(unfinished));
            let what = meeting.values().next().map_or(String::new(), |call| call.what.clone());
            // If no rank has completed it, the culprit is unknown.
            let culprits = if finished.is_empty() { Vec::new() } else { unfinished.clone() };
            let finding = Finding::Unfinished { place, what, finished, unfinished };
            self.candidates.push(Candidate { finding, culprits, waiting: Vec::new(), since_us });
        }
    }

    /// Searches the messages between two ranks of the world group for pairs with a missing or a different end.
    fn messages(&mut self) {
        let mut pairs: BTreeMap<(usize, usize, u32), Meeting<'_>> = BTreeMap::new();
        for (rank, records) in &self.records.ranks {
            let messages =
                records.operations.iter().filter(|call| call.is_message() && call.group.index == 0);
            for (call, peer) in messages.filter_map(|call| Some((call, call.root?))) {
                let (from, to) = if call.kind == "send" { (*rank, peer) } else { (peer, *rank) };
                pairs.entry((from, to, call.sequence)).or_default().insert(*rank, call);
            }
        }
        for ((from, to, sequence), ends) in pairs {
            let Some((rank, call)) = ends.iter().next() else { continue };
            let place = OperationId { sequence, group: call.group, between: Some((from, to)) };
            let since_us = first_us(&ends).unwrap_or(0);
            let peer = from + to - rank;
            let (finding, culprits) = match ends.get(&peer) {
                Some(other) if (&call.dtype, call.elements) == (&other.dtype, other.elements) => continue,
                Some(_) => {
                    let differs = vec!["elements or dtype"];
                    (Finding::Mismatch { place, differs, calls: called(&ends) }, vec![from, to])
                }
                None if call.done_us.is_some() => continue,
                None if self.records.ranks.contains_key(&peer) && self.records.has_forgotten(peer) => {
                    continue;
                }
                None => {
                    let is_known = self.records.ranks.contains_key(&peer);
                    let missing = if is_known { vec![self.records.last(peer)] } else { Vec::new() };
                    let unknown = if is_known { Vec::new() } else { vec![peer] };
                    let came = called(&ends);
                    let culprits = if is_known { vec![peer] } else { Vec::new() };
                    (Finding::Missing { place, came, missing, unknown, is_circle: false }, culprits)
                }
            };
            self.candidates.push(Candidate { finding, culprits, waiting: vec![*rank], since_us });
        }
    }
}

impl Operation {
    fn is_message(&self) -> bool {
        self.kind == "send" || self.kind == "receive"
    }
}

fn first_us(meeting: &Meeting<'_>) -> Option<u64> {
    meeting.values().map(|operation| operation.posted_us).min()
}

/// Groups ranks by call, the most frequent first; ties go to the lower rank.
fn called(meeting: &Meeting<'_>) -> Vec<Called> {
    let mut calls: Vec<Called> = Vec::new();
    for (rank, operation) in meeting {
        let position = calls.iter().position(|call| call.what == operation.what).unwrap_or_else(|| {
            calls.push(Called { what: operation.what.clone(), ranks: Vec::new(), callers: BTreeSet::new() });
            calls.len() - 1
        });
        calls[position].ranks.push(*rank);
        calls[position].callers.insert(operation.caller.clone());
    }
    calls.sort_by_key(|call| std::cmp::Reverse(call.ranks.len()));
    calls
}

/// Returns the properties in which the calls of one operation differ, if any, and the ranks in the minority.
fn mismatch(place: OperationId, meeting: &Meeting<'_>) -> Option<(Finding, Vec<usize>)> {
    type Same = fn(&Operation, &Operation) -> bool;
    const PARTS: [(&str, Same); 6] = [
        ("operation", |a, b| a.kind == b.kind),
        ("reduction", |a, b| a.op == b.op),
        ("dtype", |a, b| a.dtype == b.dtype),
        ("elements", |a, b| a.elements == b.elements),
        ("root", |a, b| a.root == b.root),
        ("lengths of the parts", |a, b| a.detail == b.detail),
    ];
    let reference = meeting.values().next()?;
    let differs: Vec<&str> = PARTS
        .iter()
        .filter(|(_, same)| !meeting.values().all(|call| same(call, reference)))
        .map(|(part, _)| *part)
        .collect();
    if differs.is_empty() {
        return None;
    }
    let calls = called(meeting);
    let culprits: BTreeSet<usize> =
        calls.iter().skip(1).flat_map(|call| call.ranks.iter().copied()).collect();
    Some((Finding::Mismatch { place, differs, calls }, culprits.into_iter().collect()))
}
