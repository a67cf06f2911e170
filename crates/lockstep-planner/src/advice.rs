//! Changes to a planning question with which a plan would fit, if none does: more nodes, shorter sequences, another batch.

use lockstep_config::human;
use lockstep_plan::{Offload, Residence};

use crate::cluster::{NodeKind, with_nodes};
use crate::search::{Observer, Progress, search};
use crate::{Objective, Planner};

/// Most nodes that are tried, as a multiple of the nodes of the question.
const MOST_NODES: usize = 1 << 16;
/// Shortest sequences that are tried, in tokens.
const SHORTEST: usize = 512;

/// Bytes of a weight in mixed precision.
const WEIGHT_BYTES: u64 = 2;
/// Bytes that Adam needs for each trained weight besides the weight: gradient, master weight and two moments.
const TRAINED_BYTES: u64 = 4 + 4 + 4 + 4;

/// A change to a question with which a plan fits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Advice {
    /// The flag that makes the change, as a user types it.
    pub flag: String,
    /// The new machines or batch in words, with the way in which the model then fits.
    pub words: String,
}

impl Planner {
    /// Returns single changes with which the model fits, in device memory or with state offloaded to host memory. `observer` may
    /// stop the search between candidates; changes found by then are returned.
    pub fn advice(&mut self, observer: &mut impl Observer) -> Vec<Advice> {
        let mut advice = Vec::new();
        let name = self.cluster.name.clone();
        let flag_of_nodes = |nodes: usize| format!("--cluster {}", with_nodes(&name, nodes));
        // The name of a partial node cannot be followed by a number of nodes.
        let has_name = !name.contains(' ');
        if let [node] = &self.cluster.nodes[..]
            && !node.device.is_host
            && has_name
        {
            let count = node.count;
            // Clusters that cannot hold the model state are not tried.
            let (state, _) = self.state_of_all();
            let of_devices = node.device.memory_bytes.saturating_mul(node.devices as u64);
            let at_least = |bytes: u64| (state.div_ceil(bytes.max(1)) as usize).max(count + 1);
            let with_host = of_devices.saturating_add(node.host_memory_bytes);
            let [in_memory, with_host] = [at_least(of_devices), at_least(with_host)];
            let in_memory = self.fewest_nodes(in_memory, false, observer);
            let may_offload = self.may_offload_to(Residence::Host);
            let offloaded = may_offload.then(|| self.fewest_nodes(with_host, true, observer)).flatten();
            if let Some(nodes) = offloaded.filter(|nodes| in_memory.is_none_or(|most| *nodes < most)) {
                let words = format!("{}: fits with state in host memory", human::plural(nodes, "node"));
                advice.push(Advice { flag: flag_of_nodes(nodes), words });
            }
            if let Some(nodes) = in_memory {
                let words = format!("{}: fits into the memory of the devices", human::plural(nodes, "node"));
                advice.push(Advice { flag: flag_of_nodes(nodes), words });
            }
        }
        let (seq_len, batch) = (self.config.train.seq_len, self.config.train.global_batch);
        let halves = std::iter::successors(Some(seq_len / 2), |tokens| Some(tokens / 2));
        for shorter in halves.take_while(|tokens| *tokens >= SHORTEST) {
            let longer_batch = batch.saturating_mul(seq_len / shorter);
            if self.with_batch(shorter, longer_batch, |planner| {
                planner.fits_somehow(true, observer) == Some(true)
            }) {
                let flag = format!("--seq-len {shorter} --global-batch {longer_batch}");
                let words = format!(
                    "sequences of {} tokens, as many tokens a step",
                    human::thousands(shorter as u64)
                );
                advice.push(Advice { flag, words });
                break;
            }
        }
        let devices = self.cluster.devices();
        let multiple = batch.div_ceil(devices) * devices;
        if multiple != batch
            && self
                .with_batch(seq_len, multiple, |planner| planner.fits_somehow(true, observer) == Some(true))
        {
            let words = format!("a batch that the {} divide", human::plural(devices, "device"));
            advice.push(Advice { flag: format!("--global-batch {multiple}"), words });
        }
        advice
    }

    /// Returns a sentence that the model state exceeds device memory, host memory and disks together; `None` if it does not.
    pub fn excess_of_state(&self) -> Option<String> {
        let (state, of_each) = self.state_of_all();
        let of_all = |bytes: fn(&NodeKind) -> u64| {
            self.cluster.nodes.iter().map(|node| bytes(node).saturating_mul(node.count as u64)).sum::<u64>()
        };
        let devices = of_all(|node| match node.device.is_host {
            true => 0,
            false => node.device.memory_bytes.saturating_mul(node.devices as u64),
        });
        let [host, disk] = [of_all(|node| node.host_memory_bytes), of_all(|node| node.disk_bytes)];
        (state > devices.saturating_add(host).saturating_add(disk)).then(|| {
            format!(
                "the state of the model takes {} ({of_each}); there are {} of device memory, {} of host memory and {} \
                 of disk",
                human::bytes(state),
                human::bytes(devices),
                human::bytes(host),
                human::bytes(disk)
            )
        })
    }

    /// Returns the bytes of the model state of one data-parallel replica over all its ranks, and their composition in words.
    fn state_of_all(&self) -> (u64, String) {
        let (parameters, trained) = (self.parameters(), self.trained_parameters());
        let state =
            parameters.saturating_mul(WEIGHT_BYTES).saturating_add(trained.saturating_mul(TRAINED_BYTES));
        let of_each = match trained == parameters {
            true => format!("{} bytes a parameter", WEIGHT_BYTES + TRAINED_BYTES),
            false => format!("{WEIGHT_BYTES} bytes a parameter, {TRAINED_BYTES} more of what is trained"),
        };
        (state, of_each)
    }

    /// Returns the fewest nodes of the cluster's kind, at least `from`, on which the model fits: in device memory, or if
    /// `may_offload` with state in host memory. If `observer` stops the search, the fewest that are known to suffice.
    fn fewest_nodes(
        &mut self,
        from: usize,
        may_offload: bool,
        observer: &mut impl Observer,
    ) -> Option<usize> {
        let most = self.cluster.nodes[0].count.saturating_mul(MOST_NODES).min(u32::MAX as usize);
        let (mut too_few, mut enough) = (from.max(1) - 1, None);
        let mut tried = from.max(1);
        while enough.is_none() && tried <= most {
            match self.on_nodes(tried, |planner| planner.fits_somehow(may_offload, observer))? {
                true => enough = Some(tried),
                false => (too_few, tried) = (tried, tried * 2),
            }
        }
        let mut enough = enough?;
        while enough > too_few + 1 {
            let middle = too_few.midpoint(enough);
            match self.on_nodes(middle, |planner| planner.fits_somehow(may_offload, observer)) {
                Some(true) => enough = middle,
                Some(false) => too_few = middle,
                None => break,
            }
        }
        Some(enough)
    }

    /// Returns true if any candidate fits; `None` if `observer` stopped the search before one was found. Candidates that leave most
    /// memory free are evaluated first.
    fn fits_somehow(&mut self, may_offload: bool, observer: &mut impl Observer) -> Option<bool> {
        let (objective, offloads) = (self.objective, self.offloads.clone());
        self.objective = Objective::Headroom;
        let mut places = vec![vec![Offload::default()]];
        if may_offload && self.may_offload_to(Residence::Host) {
            places.push(Offload::all_to(Residence::Host));
        }
        let mut is_stopped = false;
        let fits = places.into_iter().any(|offloads| {
            self.offloads = offloads;
            let mut until_found = |progress: Progress| {
                is_stopped |= !observer.goes_on(progress);
                progress.best.is_none() && !is_stopped
            };
            !search(self.candidates(), 1, self, &mut until_found).best.is_empty()
        });
        (self.objective, self.offloads) = (objective, offloads);
        (fits || !is_stopped).then_some(fits)
    }

    /// Returns `answer` for the question with another number of nodes.
    pub(crate) fn on_nodes<T>(&mut self, nodes: usize, answer: impl FnOnce(&mut Self) -> T) -> T {
        let count = std::mem::replace(&mut self.cluster.nodes[0].count, nodes);
        let answer = self.afresh(answer);
        self.cluster.nodes[0].count = count;
        answer
    }

    /// Returns `answer` for the question with another sequence length and global batch.
    fn with_batch<T>(
        &mut self,
        seq_len: usize,
        global_batch: usize,
        answer: impl FnOnce(&mut Self) -> T,
    ) -> T {
        let train = &self.config.train;
        let before = (train.seq_len, train.global_batch);
        (self.config.train.seq_len, self.config.train.global_batch) = (seq_len, global_batch);
        let answer = self.afresh(answer);
        (self.config.train.seq_len, self.config.train.global_batch) = before;
        answer
    }

    /// Runs `answer` with empty caches; recordings are kept, since they depend on shapes alone.
    pub(crate) fn afresh<T>(&mut self, answer: impl FnOnce(&mut Self) -> T) -> T {
        let caches = std::mem::take(&mut self.caches);
        let answer = answer(self);
        self.caches = caches;
        answer
    }
}
