//! The planner: predicts step time and memory of a training run on given machines, and searches for its best plan.
//!
//! The pure parts are [`predict`](crate::predict), the step-time model, [`search`](mod@crate::search), which enumerates and ranks
//! candidates, and [`predicted`](lockstep_plan::predicted), the memory of each rank. This module records the run's model under every
//! sharding that a search visits, and turns the result into a configuration that `train` executes.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use lockstep_config::{Origin, ResolvedModel, RunConfig, plan, resolve_model};
use lockstep_model::{Tuning, tuned_records};
use lockstep_plan::schedule::{Kind, Schedule};
use lockstep_plan::{ContextMethod, Facts, Offload, PlannedStep, Residence};

use crate::caches::Caches;
use crate::cluster::Cluster;
use crate::recordings::Recordings;
use crate::search::{Candidate, Found, Observer, Ranking, Space, search};
use crate::system::SystemTraits;
use crate::{Error, Evaluated, workload};

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
    /// Duration of the search, in milliseconds.
    pub ms: f64,
}

/// A run and the machines that it is planned for, with caches of what searches have computed.
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
    pub(crate) caches: Caches,
    /// Number of rank ledgers that searches have computed so far.
    pub(crate) ledgers: usize,
}

impl Planner {
    /// Returns a planner for `config` on `cluster`. A search chooses degrees, schedule, recomputation and ZeRO stage; all other
    /// keys of `[parallel]` hold for every plan.
    ///
    /// # Errors
    /// If the model cannot be resolved.
    pub fn new(mut config: RunConfig, cluster: Cluster, objective: Objective) -> Result<Self, Error> {
        if !cluster.is_host() {
            // The cores of the planning machine affect neither the time nor the memory of a device.
            config.train.threads = 1;
        }
        let style = cluster.software.traits();
        if style.dropout > 0.0 && config.origin("train.dropout") == Origin::Default {
            config.train.dropout = style.dropout;
        }
        let model = resolve_model(&config)?;
        let recordings = Recordings::new(&config, &model, style);
        Ok(Self {
            config,
            model,
            cluster,
            objective,
            offloads: vec![Offload::default()],
            ranks: None,
            recordings,
            schedules: HashMap::new(),
            caches: Caches::default(),
            ledgers: 0,
        })
    }

    /// Restricts the planner to plans of exactly `ranks` ranks.
    #[must_use]
    pub fn with_ranks(self, ranks: usize) -> Self {
        Self { ranks: Some(ranks), ..self }
    }

    /// Returns the machines that the run is planned for.
    pub fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    /// Returns the implementation choices of the system that is planned for.
    pub(crate) fn traits(&self) -> SystemTraits {
        self.cluster.software.traits()
    }

    /// Returns the configuration of the run.
    pub fn config(&self) -> &RunConfig {
        &self.config
    }

    /// Returns the number of parameters of the model, without those of an adapter.
    pub fn parameters(&self) -> u64 {
        self.model.config.parameter_count()
    }

    /// Returns the number of trained parameters: all of the model, or with fine-tuning those that are not frozen and the adapter's.
    pub fn trained_parameters(&self) -> u64 {
        if self.model.tuning == Tuning::default() {
            return self.parameters();
        }
        let records = tuned_records(&self.model.config, &self.model.tuning);
        let trained = records.iter().filter(|record| record.trainable && record.tie.is_none());
        trained.map(|record| record.elements() as u64).sum()
    }

    /// Returns the workload in one line: model, precision and batch.
    pub fn workload_in_words(&self) -> String {
        workload::workload_in_words(&self.config, self.parameters(), self.trained_parameters())
    }

    /// Returns the name of the model: its preset, family or directory.
    pub fn model_name(&self) -> String {
        workload::model_name(&self.config)
    }

    /// Returns the number of blocks of the model.
    pub fn layers(&self) -> usize {
        self.model.config.num_hidden_layers()
    }

    /// Returns the number of rank ledgers that searches have computed so far; they take most of the time of a search with offload.
    pub fn ledgers(&self) -> usize {
        self.ledgers
    }

    /// Returns the search space for a number of devices.
    pub(crate) fn space(&self, devices: usize) -> Space {
        let facts = plan::facts_of(&self.config, &self.model.config);
        let facts = plan::facts_of_tuning(facts, &self.model.tuning);
        Space {
            facts: Facts { world_size: devices, ..facts },
            devices_of_a_node: self.cluster.devices_of_a_node().min(devices),
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

    /// Returns every candidate plan. On a host, a rank may have several of its cores.
    pub fn candidates(&self) -> Vec<Candidate> {
        let numbers = self.numbers_of_devices().into_iter();
        numbers.flat_map(|devices| self.space(devices).candidates()).collect()
    }

    /// Returns the device counts that a plan may use.
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

    /// Returns the device counts to try for the lowest price: all nodes and their repeated halves; all nodes alone in a mixed cluster.
    pub(crate) fn numbers_of_nodes(&self) -> Vec<usize> {
        let [node] = &self.cluster.nodes[..] else { return vec![self.cluster.devices()] };
        let halves = std::iter::successors(Some(node.count), |nodes| (nodes % 2 == 0).then_some(nodes / 2));
        halves.map(|nodes| nodes * node.devices).collect()
    }

    /// Returns true if ranks live in host memory and compute with CPU cores.
    pub fn is_host(&self) -> bool {
        self.cluster.is_host()
    }

    /// Finds the `top` best plans: with everything in device memory; if none fits, with state offloaded to host memory; if none
    /// fits then, to disk.
    pub fn find(&mut self, top: usize) -> Searched {
        self.find_observed(top, &mut ())
    }

    /// As [`Planner::find`], with an observer that is told of the progress and may stop the search.
    pub fn find_observed(&mut self, top: usize, observer: &mut impl Observer) -> Searched {
        let begin = Instant::now();
        let mut found = search(self.candidates(), top, self, observer);
        for place in [Residence::Host, Residence::Disk] {
            if found.best.is_empty() && !found.is_stopped && self.may_offload_to(place) {
                // The offloads stay set, so that neighbours of the plans found are evaluated in the same space.
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
    /// If the configuration does not fit its model, or has more ranks than there are devices.
    pub fn of_run(&mut self) -> Result<Evaluated, Error> {
        let config = self.config.clone();
        self.evaluate(&config)
    }
}
