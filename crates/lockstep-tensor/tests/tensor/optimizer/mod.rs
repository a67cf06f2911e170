//! Optimizer steps against the formulas of their papers and of PyTorch.

mod adamw;
mod lion;
mod muon;
mod norm;
mod sgd;
