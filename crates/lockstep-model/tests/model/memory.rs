//! Saved activations of a block, checked against published counts.
//!
//! Korthikanti et al. (2022, section 4): a transformer layer in 16 bits saves `s b h (10 + 24/t + 5 a s / (h t))`
//! bytes on each of `t` tensor-parallel ranks, and `s b h (34/t + 5 a s / (h t))` with sequence parallelism. The last
//! term vanishes if the attention scores are recomputed.

use lockstep_graph::{BlockShape, Recompute};
use lockstep_model::{ModelConfig, RecordedModel, RecordingOptions, Tuning};
use lockstep_plan::{DType, Places, TensorDimensions, TensorPlace};

const SHAPE: BlockShape = BlockShape { sequences: 4, seq_len: 1024, dtype: DType::BF16 };

/// Bytes that a block saves per element of its input, times `ranks`.
fn kept(ranks: usize, splits_tokens: bool, recompute: Recompute) -> f64 {
    kept_on(TensorPlace { ranks, splits_tokens, ..TensorPlace::default() }, recompute)
}

/// Counts bytes as `kept` does, under two-dimensional tensor parallelism.
fn kept_on_a_square(ranks: usize, recompute: Recompute) -> f64 {
    let dimensions = TensorDimensions::Two;
    kept_on(TensorPlace { ranks, splits_tokens: true, dimensions, ..TensorPlace::default() }, recompute)
}

fn kept_on(tensor: TensorPlace, recompute: Recompute) -> f64 {
    let (model, recorded) = recorded(tensor, recompute);
    let sbh = SHAPE.tokens() * model.hidden_size();
    recorded.frame_bytes(1) as f64 * tensor.ranks as f64 / sbh as f64
}

fn recorded(tensor: TensorPlace, recompute: Recompute) -> (ModelConfig, RecordedModel) {
    let model = ModelConfig::preset("gpt2-124m").unwrap().with_dropout(0.1);
    let places = Places { tensor, ..Places::default() };
    let options = RecordingOptions::training(SHAPE, recompute.into(), places);
    let recorded = RecordedModel::tuned(&model, &Tuning::default(), options);
    (model, recorded)
}

/// Asserts that two counts differ at most by the statistics of norms and of the softmax, a few numbers per row.
fn assert_is(found: f64, expected: f64, what: &str) {
    assert!((expected..expected + 0.2).contains(&found), "{what}: {found} s b h, and not {expected}");
}

#[test]
fn a_block_keeps_what_is_published_but_for_the_masks() {
    // The masks of the two dropouts outside attention, one byte per element, are regenerated in the backward.
    for ranks in [1, 2, 4] {
        let published = 10.0 * ranks as f64 + 24.0;
        let masks = 2.0 * ranks as f64;
        let found = kept(ranks, false, Recompute::None);
        assert_is(found, published - masks, &format!("{ranks} ranks"));
    }
}

#[test]
fn with_sequence_parallelism_all_of_it_is_shared_out() {
    // Besides the masks, the outputs of the two norms are not saved: they are all-gathered again in the backward.
    let (published, masks, norms) = (34.0, 2.0, 4.0);
    for ranks in [2, 4] {
        let found = kept(ranks, true, Recompute::None);
        assert_is(found, published - masks - norms, &format!("{ranks} ranks"));
    }
}

#[test]
fn a_square_of_ranks_keeps_the_outputs_of_norms_as_blocks() {
    // Everything but the masks (32), and also without what is cheap to recompute (20).
    for ranks in [4, 16] {
        assert_is(kept_on_a_square(ranks, Recompute::None), 32.0, &format!("{ranks} ranks"));
        assert_is(kept_on_a_square(ranks, Recompute::Selective), 20.0, &format!("selective, {ranks} ranks"));
        assert_is(kept_on_a_square(ranks, Recompute::Full), 2.0, &format!("full, {ranks} ranks"));
    }
}

#[test]
fn slices_of_what_blocks_were_given_are_all_that_full_recomputation_keeps() {
    for ranks in [2, 3, 4] {
        let tensor = |slices_inputs| TensorPlace { ranks, slices_inputs, ..TensorPlace::default() };
        let whole = 2.0 * ranks as f64;
        assert_is(kept_on(tensor(false), Recompute::Full), whole, &format!("whole, {ranks} ranks"));
        assert_is(kept_on(tensor(true), Recompute::Full), 2.0, &format!("slices, {ranks} ranks"));
        // Only the inputs of fully recomputed blocks are sliced: none under selective recomputation, and never the head's.
        let (_, some) = recorded(tensor(true), Recompute::Selective);
        assert!((0..some.units()).all(|unit| !some.slices_output(unit)));
        let (_, all) = recorded(tensor(true), Recompute::Full);
        let sliced = (0..all.units()).filter(|unit| all.slices_output(*unit)).count();
        assert_eq!((sliced, all.slices_output(all.units() - 2)), (all.units() - 2, false));
    }
}

#[test]
fn recomputation_keeps_less() {
    // Norms and GELU are recomputed: their outputs take 4 + 8 bytes. With full recomputation only the block's output is saved.
    assert_is(kept(1, false, Recompute::Selective), 20.0, "selective");
    assert_is(kept(1, false, Recompute::Full), 2.0, "full");
    assert_is(kept(2, true, Recompute::Selective), 20.0, "selective, on two ranks");
    assert_is(kept(2, true, Recompute::Full), 2.0, "full, on two ranks");
}
