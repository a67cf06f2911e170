//! The published pipeline schedules by name, with their numbers of chunks and their assignment of stages to ranks.

use crate::named_enum::named_enum;

named_enum! {
    /// A published pipeline schedule.
    pub enum Kind {
        /// GPipe: all forwards, then all backwards (Huang et al. 2019).
        GPipe = "gpipe",
        /// 1F1B: forwards and backwards alternate, so a rank has no more micro-batches in flight than there are ranks from it to the last
        /// (Narayanan et al. 2019; PipeDream-Flush, 2021).
        OneForwardOneBackward = "1f1b",
        /// 1F1B with several chunks per rank, in groups of as many micro-batches as ranks (Narayanan et al. 2021, section 2.2). The bubble
        /// shrinks by the number of chunks.
        Interleaved = "interleaved_1f1b",
        /// Chunk after chunk, with all micro-batches through each (Lamy-Poirier 2022, "Breadth-First Pipeline Parallelism").
        LoopedBreadthFirst = "looped_bfs",
        /// 1F1B with a split backward and the same memory (Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2.3, ZB-H1).
        ZeroBubbleH1 = "zb_h1",
        /// Two chunks per rank in a V: the last stage is on the first rank (Qi et al. 2024, "Pipeline Parallelism with Controllable Memory",
        /// section 4, V-ZB).
        ZeroBubbleV = "zb_v",
        /// The V-shaped half of DualPipe (DeepSeek-AI 2025, DeepSeek-V3 report, section 3.2.1). In its steady state a forward comes directly
        /// before a backward of another chunk, so that an engine may overlap the communication of each with the compute of the other. Engine
        /// and simulator run the two one after the other, and the forward's output is sent before the backward. A rank then waits for P - 1
        /// passes, half of DeepSeek's (P - 1)(F&B + B - 3W), which holds for pairs whose results are sent together, with F&B = F + B and B =
        /// 2F = 2W.
        DualPipeV = "dualpipe_v",
    }
}

impl Kind {
    /// Returns the schedule with this name; `None` if there is none.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// Returns true if the chunks form a V: chunk 0 of rank `i` is stage `i`, chunk 1 is the stage equally far from the end.
    pub const fn is_v_shaped(self) -> bool {
        matches!(self, Self::ZeroBubbleV | Self::DualPipeV)
    }

    /// Returns true if the schedule splits backwards.
    pub const fn splits_backward(self) -> bool {
        matches!(self, Self::ZeroBubbleH1 | Self::ZeroBubbleV | Self::DualPipeV)
    }

    /// Returns the minimum and the maximum number of chunks per rank.
    pub const fn chunks(self) -> (usize, usize) {
        match self {
            Self::GPipe | Self::OneForwardOneBackward | Self::ZeroBubbleH1 => (1, 1),
            Self::Interleaved => (2, usize::MAX),
            Self::LoopedBreadthFirst => (1, usize::MAX),
            Self::ZeroBubbleV | Self::DualPipeV => (2, 2),
        }
    }

    /// Returns the stage that is chunk `chunk` of rank `rank`.
    pub const fn stage(self, rank: usize, chunk: usize, ranks: usize) -> usize {
        if self.is_v_shaped() && chunk == 1 { 2 * ranks - 1 - rank } else { chunk * ranks + rank }
    }
}
