//! What the memory of an engine will be, from what it is built for.

use lockstep_graph::Mode;
use lockstep_model::{HeadOutput, RecordedModel, RecordingOptions};
use lockstep_plan::{Axis, DType, Mesh, StatePlan, ZeroStage};
use lockstep_tensor::Workers;

use crate::optimizer::Role;
use crate::{EngineOptions, GroupOptions, Places, StateKind, Storage, WeightStorage};

impl EngineOptions {
    /// What a model is recorded for, on a rank with these places.
    pub fn recording(&self, Places { tensor, context, experts }: Places) -> RecordingOptions {
        let (mode, head_output) = (Mode::Training, HeadOutput::Losses);
        let Self { shape, recompute, .. } = *self;
        RecordingOptions { mode, shape, recompute, head_output, tensor, context, experts }
    }

    /// How the state of `model` is kept on a rank of `mesh`: as `storage` says, shared out as `groups` says, without copies.
    pub fn state_plan(
        &self,
        model: &RecordedModel,
        storage: &Storage,
        groups: Option<&GroupOptions>,
        mesh: &Mesh,
    ) -> StatePlan {
        let kinds = StateKind::OF_OPTIMIZERS.into_iter().map(|kind| {
            let is_kept =
                |record| self.optimizer.state_kinds(Role::of(record, model.units())).contains(&kind);
            (kind, model.records().iter().map(is_kept).collect())
        });
        StatePlan {
            zero_stage: groups.map_or(ZeroStage::Nothing, |options| options.zero_stage),
            wrap: storage.wrap.clone(),
            gathering: groups.map(GroupOptions::gathering).unwrap_or_default(),
            quantization: groups.map(|options| options.quantization).unwrap_or_default(),
            replicas: mesh.ranks().degree(Axis::Replicate),
            has_master: self.shape.dtype != DType::F32 && storage.weights == WeightStorage::Master,
            optimizer_dtype: storage.state,
            optimizer_keeps: kinds.collect(),
            on_disk: storage.offload.plan(),
            has_activations_on_disk: storage.offload.has_activations(),
            micro_batches: self.micro_batches * mesh.ranks().degree(Axis::Context),
            packed_bytes: Workers::booked_bytes(self.threads),
            kept_copies: 0,
            saved_copies: 0,
        }
    }
}
