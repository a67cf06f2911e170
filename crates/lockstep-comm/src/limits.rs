//! Limits of worlds and groups.

/// Maximum number of ranks in a world. State that grows with the world holds at most a few bytes per rank, see `tcp`.
pub const MAX_WORLD: usize = 1 << 16;
/// Maximum number of ranks that share the memory of one machine: each maps one segment per rank, with slots for every pair.
pub const MAX_LOCAL_RANKS: usize = 64;
/// Maximum number of partitions of a world, including the one that holds all ranks in one group.
pub const MAX_PARTITIONS: usize = 64;
