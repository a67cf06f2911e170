//! The planner: how a model is best trained on some machines, how long a step takes, what each rank needs, and why not otherwise.
//!
//! The pure part is `lockstep_plan`: [`predict`](crate::predict) says how long a step takes,
//! [`search`](crate::search) which plans there are and which of them is best, and
//! [`predicted`](lockstep_plan::predicted) what each rank holds. Here they are given a run's model, recorded for every way to share it
//! that is looked at, and what comes out is a configuration that `train` carries out.

use std::collections::HashMap;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use lockstep_config::{Origin, ResolvedModel, RunConfig, plan, resolve_model};
use lockstep_model::{Tuning, tuned_records};
use lockstep_plan::schedule::{Kind, Schedule};
use lockstep_plan::{ContextMethod, Facts, Offload, PlannedStep, Recompute, Residence};

use crate::bounds::{CutKey, Outline, PassKey};
use crate::cluster::{Cluster, Software};
use crate::recordings::{Recordings, Uniform};
use crate::search::{Candidate, Found, Observer, Ranking, Space, search};
use crate::{Error, Evaluated, machine, workload};

/// The figure by which plans are ranked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Objective {
    /// The least time of a step.
    #[default]
    Time,
    /// The least price of a step, with as many of the nodes as pay.
    Cost,
    /// The most memory left on the rank that has least.
    Headroom,
}

/// Predicts a step of `config` on this machine; `None` if it was not measured, or if other machines take part.
pub fn foretell(config: &RunConfig) -> Option<PlannedStep> {
    predicted_step(config, machine::of_run(config)?).ok()
}

/// Predicts a step of `config` on `cluster`.
pub(crate) fn predicted_step(config: &RunConfig, cluster: Cluster) -> Result<PlannedStep, Error> {
    let mut planner = Planner::new(config.clone(), cluster, Objective::Time)?;
    let evaluated = planner.of_run()?;
    Ok(evaluated.planned_step(planner.cluster()))
}

/// The result of a search, and the time it took.
#[derive(Debug, Clone)]
pub struct Searched {
    /// The best plans.
    pub ranking: Ranking<Evaluated>,
    /// Milliseconds.
    pub ms: f64,
}

/// A run, and the machines that it is to be planned for.
#[derive(Debug)]
pub struct Planner {
    pub(crate) config: RunConfig,
    pub(crate) model: ResolvedModel,
    pub(crate) cluster: Cluster,
    pub(crate) objective: Objective,
    /// Kinds of state that a search may offload.
    pub(crate) offloads: Vec<Offload>,
    /// Number of ranks, if it is fixed.
    pub(crate) ranks: Option<usize>,
    pub(crate) recordings: Recordings,
    pub(crate) schedules: HashMap<(Kind, usize, usize, usize), Option<Arc<Schedule>>>,
    pub(crate) outlines: HashMap<PassKey, Outline>,
    pub(crate) uniforms: HashMap<(PassKey, Recompute), Rc<Uniform>>,
    pub(crate) cuts: HashMap<CutKey, Option<Vec<Range<usize>>>>,
    /// Ledgers of ranks that candidates were held against.
    pub(crate) ledgers: usize,
}

impl Planner {
    /// A planner for `config` on `cluster`. What `config` says of `[parallel]` beside degrees, schedule, recomputation and ZeRO holds for
    /// every plan.
    ///
    /// # Errors
    /// A model that cannot be had.
    pub fn new(mut config: RunConfig, cluster: Cluster, objective: Objective) -> Result<Self, Error> {
        let is_host = cluster.nodes.iter().any(|node| node.device.is_host);
        if !is_host {
            // Nothing of a device's time or memory depends on the cores of the machine that plans.
            config.train.threads = 1;
        }
        // Those systems trained with dropout, whose masks they kept.
        let drops = matches!(cluster.software, Software::Megatron | Software::DeepSpeed);
        if drops && config.origin("train.dropout") == Origin::Default {
            config.train.dropout = 0.1;
        }
        let model = resolve_model(&config)?;
        let recordings = Recordings::new(&config, &model, cluster.software);
        Ok(Self {
            config,
            model,
            cluster,
            objective,
            offloads: vec![Offload::default()],
            ranks: None,
            recordings,
            schedules: HashMap::new(),
            outlines: HashMap::new(),
            uniforms: HashMap::new(),
            cuts: HashMap::new(),
            ledgers: 0,
        })
    }

    /// The same, for plans of so many ranks and no others.
    #[must_use]
    pub fn with_ranks(self, ranks: usize) -> Self {
        Self { ranks: Some(ranks), ..self }
    }

    /// The machines.
    pub fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    /// The run.
    pub fn config(&self) -> &RunConfig {
        &self.config
    }

    /// Parameters of the model, without those of an adapter.
    pub fn parameters(&self) -> u64 {
        self.model.config.parameter_count()
    }

    /// Parameters that are trained: all of the model, or what fine-tuning leaves or adds.
    pub fn trained_parameters(&self) -> u64 {
        if self.model.tuning == Tuning::default() {
            return self.parameters();
        }
        let records = tuned_records(&self.model.config, &self.model.tuning);
        let trained = records.iter().filter(|record| record.trainable && record.tie.is_none());
        trained.map(|record| record.elements() as u64).sum()
    }

    /// The workload in one line: model, precision and batch.
    pub fn workload_in_words(&self) -> String {
        workload::workload_in_words(&self.config, self.parameters(), self.trained_parameters())
    }

    /// Name of the model: its preset, family or directory.
    pub fn model_name(&self) -> String {
        workload::model_name(&self.config)
    }

    /// Blocks of the model.
    pub fn layers(&self) -> usize {
        self.model.config.num_hidden_layers()
    }

    /// Number of ledgers of ranks that searches have computed so far: most of the time of a search with offload.
    pub fn ledgers(&self) -> usize {
        self.ledgers
    }

    /// Returns the search space for a number of devices.
    pub(crate) fn space(&self, devices: usize) -> Space {
        let facts = plan::facts_of(&self.config, &self.model.config);
        let of_a_node = self.cluster.nodes.iter().map(|node| node.devices).min().unwrap_or(1);
        Space {
            facts: Facts { world_size: devices, ..facts },
            devices_of_a_node: of_a_node.min(devices),
            micro_batch: self.config.plan.micro_batch,
            tries_whole_tokens: self.is_host(),
            context_methods: self.context_methods(),
            offloads: self.offloads.clone(),
        }
    }

    /// Returns true if the search may choose ring attention.
    pub(crate) fn leaves_ring_open(&self) -> bool {
        self.context_methods().contains(&ContextMethod::Ring)
    }

    /// Returns the context-parallel methods that the run leaves open: all, or the one that it names.
    pub(crate) fn context_methods(&self) -> Vec<ContextMethod> {
        let own = self.config.plan.context_method;
        if self.config.origin("parallel.context_parallel_method") != Origin::Default {
            return vec![own];
        }
        vec![ContextMethod::Ring, ContextMethod::AllGather, ContextMethod::AllToAll]
    }

    /// Every plan that there is to choose from. Of a host's cores a rank may have several.
    pub fn candidates(&self) -> Vec<Candidate> {
        let numbers = self.numbers_of_devices().into_iter();
        numbers.flat_map(|devices| self.space(devices).candidates()).collect()
    }

    /// The numbers of devices that a plan may use.
    pub(crate) fn numbers_of_devices(&self) -> Vec<usize> {
        let devices = self.cluster.devices();
        match (self.ranks, self.objective) {
            (Some(ranks), _) => vec![ranks],
            _ if self.is_host() => (1..=devices).filter(|ranks| devices.is_multiple_of(*ranks)).collect(),
            (None, Objective::Cost) => self.numbers_of_nodes(),
            _ => vec![devices],
        }
    }

    /// Returns true if a candidate is one of [`Planner::candidates`].
    pub(crate) fn is_candidate(&self, candidate: &Candidate) -> bool {
        let devices = self.numbers_of_devices();
        let ranks = candidate.degrees.world_size();
        devices.into_iter().any(|devices| ranks == Some(devices) && self.space(devices).contains(candidate))
    }

    /// Devices of as many nodes as may pay: halves of all, of clusters with one kind of them.
    pub(crate) fn numbers_of_nodes(&self) -> Vec<usize> {
        let [node] = &self.cluster.nodes[..] else { return vec![self.cluster.devices()] };
        let halves = std::iter::successors(Some(node.count), |nodes| (nodes % 2 == 0).then_some(nodes / 2));
        halves.map(|nodes| nodes * node.devices).collect()
    }

    /// Returns true if ranks live in host memory and compute with CPU cores.
    pub fn is_host(&self) -> bool {
        self.cluster.nodes.iter().any(|node| node.device.is_host)
    }

    /// The `top` best plans: in device memory; if none fits, with state offloaded to host memory; if none does, to disk.
    pub fn find(&mut self, top: usize) -> Searched {
        self.find_observed(top, &mut ())
    }

    /// The same, told to an observer, which may stop the search.
    pub fn find_observed(&mut self, top: usize, observer: &mut impl Observer) -> Searched {
        let begin = Instant::now();
        let mut found = search(self.candidates(), top, self, observer);
        for place in [Residence::Host, Residence::Disk] {
            if found.best.is_empty() && !found.is_stopped && self.may_offload_to(place) {
                // It stays so: neighbours of what is found are of the same space.
                self.offloads = Offload::all_to(place);
                found = search(self.candidates(), top, self, observer);
            }
        }
        let Ranking { best, rejected, candidates, valued, is_stopped, gap } = found;
        let best = best.into_iter().filter_map(|Found { candidate, objective, value }| {
            let run = self.run_under(value);
            let value = self.evaluate(&run).ok().filter(|evaluated| evaluated.fits)?;
            Some(Found { candidate, objective, value })
        });
        let ranking = Ranking { best: best.collect(), rejected, candidates, valued, is_stopped, gap };
        Searched { ranking, ms: begin.elapsed().as_secs_f64() * 1e3 }
    }

    /// Evaluates the plan that the run's own `[parallel]` describes.
    ///
    /// # Errors
    /// A configuration that does not fit its model.
    pub fn of_run(&mut self) -> Result<Evaluated, Error> {
        let config = self.config.clone();
        self.evaluate(&config)
    }
}
