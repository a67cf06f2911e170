//! Detection of the launcher of this process, and of the process's rank, from environment variables, as a pure function.
//!
//! Launchers are looked for from the innermost to the outermost, since one often starts another: torchrun's variables (which
//! `lockstep` sets too), OpenMPI, MPICH, SLURM, Kubernetes. The first complete set counts. Invalid numbers and incomplete
//! sets are errors, as are two launchers that claim this rank and differ.

mod node_list;

use std::fmt;

use lockstep_comm::{Leader, MAX_WORLD};

pub use node_list::{first_node, tasks_on_node};

/// A launcher whose variables are understood.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Launcher {
    /// `RANK` and related variables: `lockstep`'s own agent, torchrun, Kubeflow.
    Torchrun,
    /// `mpirun` of OpenMPI.
    OpenMpi,
    /// `mpirun` of MPICH and related implementations (Hydra).
    Mpich,
    /// `srun` of SLURM.
    Slurm,
    /// A Kubernetes Job with completion mode `Indexed`: one process per pod.
    Kubernetes,
}

impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Torchrun => "torchrun",
            Self::OpenMpi => "OpenMPI",
            Self::Mpich => "MPICH",
            Self::Slurm => "SLURM",
            Self::Kubernetes => "Kubernetes",
        })
    }
}

/// Place of a process in a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProcessPlace {
    /// Launcher that set the variables.
    pub launcher: Launcher,
    /// Rank in the world.
    pub rank: usize,
    /// Number of ranks; `None` for Kubernetes, where only the run's configuration knows it.
    pub world_size: Option<usize>,
    /// Rank among those of the host, if the launcher sets it.
    pub local_rank: Option<usize>,
    /// Number of ranks on the host, if the launcher sets it; otherwise ranks determine it when they meet.
    pub local_size: Option<usize>,
    /// Address where ranks meet, if the launcher sets it.
    pub leader: Option<Leader>,
}

/// Reason why an environment is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct EnvironmentProblem(String);

impl EnvironmentProblem {
    /// Returns the problem of a value that is not allowed.
    fn value(variable: &str, value: &str, allowed: &str) -> Self {
        Self(format!("{variable}={value:?}: allowed is {allowed}"))
    }

    /// Returns the problem of an incomplete set of variables.
    fn incomplete(launcher: Launcher, present: &str, missing: &str) -> Self {
        Self(format!("{present} is set, but {missing} is not ({launcher})"))
    }
}

/// Returns the place in the run of a process with this environment; `None` if no launcher started it as a rank.
///
/// # Errors
/// If a set of variables is invalid or incomplete, or two launchers differ.
pub fn detect(variable: &dyn Fn(&str) -> Option<String>) -> Result<Option<ProcessPlace>, EnvironmentProblem> {
    let environment = Environment { variable };
    let torchrun = environment.torchrun()?;
    let mpi = match environment.four_numbers(Launcher::OpenMpi, OPEN_MPI)? {
        Some(place) => Some(place),
        None => environment.mpich()?,
    };
    if let (Some(first), Some(second)) = (&torchrun, &mpi)
        && (first.rank, first.world_size) != (second.rank, second.world_size)
    {
        let says = |place: &ProcessPlace| {
            format!("{} says rank {} of {}", place.launcher, place.rank, place.world_size.unwrap_or(0))
        };
        let (first, second) = (says(first), says(second));
        return Err(EnvironmentProblem(format!("{first}, {second}: unset the variables of one of them")));
    }
    if let Some(place) = torchrun.or(mpi) {
        return Ok(Some(place));
    }
    match environment.slurm()? {
        Some(place) => Ok(Some(place)),
        None => environment.kubernetes(),
    }
}

struct Environment<'a> {
    variable: &'a dyn Fn(&str) -> Option<String>,
}

/// Names of a launcher's variables for the rank, the number of ranks, and both on this host.
type Names = [&'static str; 4];

const TORCHRUN: Names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"];
/// Names of DeepSpeed's launcher, which are torchrun's but for one.
const DEEPSPEED: Names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE"];
const OPEN_MPI: Names = [
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
];
const MPICH: Names = ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"];

impl Environment<'_> {
    fn torchrun(&self) -> Result<Option<ProcessPlace>, EnvironmentProblem> {
        let place = if self.get("LOCAL_WORLD_SIZE").is_some() {
            self.four_numbers(Launcher::Torchrun, TORCHRUN)?
        } else if self.get("LOCAL_SIZE").is_some() {
            self.four_numbers(Launcher::Torchrun, DEEPSPEED)?
        } else {
            self.two_numbers()?
        };
        let Some(place) = place else { return Ok(None) };
        Ok(Some(ProcessPlace { leader: self.leader()?, ..place }))
    }

    /// Reads `RANK` and `WORLD_SIZE` alone, as scripts set them by hand. Kubeflow's PyTorchJob sets them as well, but
    /// per machine: there, `PET_NNODES` without `LOCAL_RANK` means that a launcher is yet to be started.
    fn two_numbers(&self) -> Result<Option<ProcessPlace>, EnvironmentProblem> {
        if self.get("PET_NNODES").is_some() && self.get("LOCAL_RANK").is_none() {
            return Ok(None);
        }
        let (rank, world_size) = (self.number("RANK")?, self.number("WORLD_SIZE")?);
        let local_rank = self.number("LOCAL_RANK")?;
        let launcher = Launcher::Torchrun;
        let missing = |present, missing| EnvironmentProblem::incomplete(launcher, present, missing);
        let (rank, world_size) = match (rank, world_size) {
            (Some(rank), Some(world_size)) => (rank, world_size),
            (Some(_), None) => return Err(missing("RANK", "WORLD_SIZE")),
            (None, Some(_)) => return Err(missing("WORLD_SIZE", "RANK")),
            (None, None) if local_rank.is_some() => return Err(missing("LOCAL_RANK", "RANK")),
            (None, None) => return Ok(None),
        };
        let names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "WORLD_SIZE"];
        let numbers = [rank, world_size, local_rank.unwrap_or(0), world_size];
        Ok(Some(ProcessPlace { local_rank, local_size: None, ..place_of(launcher, names, numbers)? }))
    }

    fn mpich(&self) -> Result<Option<ProcessPlace>, EnvironmentProblem> {
        // SLURM's own PMI sets the first two variables only; SLURM's variables decide then.
        if self.get("SLURM_PROCID").is_some() && self.get(MPICH[2]).is_none() {
            return Ok(None);
        }
        self.four_numbers(Launcher::Mpich, MPICH)
    }

    /// Reads the variables of a step of `srun`. The shell of an allocation is not a step: its variables describe the
    /// allocation, not processes that were started.
    fn slurm(&self) -> Result<Option<ProcessPlace>, EnvironmentProblem> {
        let is_shell = |name: String| matches!(name.as_str(), "bash" | "interactive");
        if self.get("SLURM_STEP_ID").is_none() || self.get("SLURM_JOB_NAME").is_some_and(is_shell) {
            return Ok(None);
        }
        let Some(rank) = self.number("SLURM_PROCID")? else { return Ok(None) };
        let launcher = Launcher::Slurm;
        let missing = |missing| EnvironmentProblem::incomplete(launcher, "SLURM_PROCID", missing);
        let world_size = self.number("SLURM_NTASKS")?.ok_or_else(|| missing("SLURM_NTASKS"))?;
        let local_rank = self.number("SLURM_LOCALID")?.ok_or_else(|| missing("SLURM_LOCALID"))?;
        let node = self.number("SLURM_NODEID")?.unwrap_or(0);
        let name = "SLURM_STEP_TASKS_PER_NODE";
        let tasks = self.get(name).ok_or_else(|| missing(name))?;
        let local_size = tasks_on_node(&tasks, node).ok_or_else(|| {
            let allowed = format!("a list such as 4(x2),3 that has a node {node}");
            EnvironmentProblem::value(name, &tasks, &allowed)
        })?;
        let leader = self.get("SLURM_STEP_NODELIST").map(|list| match first_node(&list) {
            Some(host) => Ok(Leader { host, port: None }),
            None => {
                let allowed = "a list of nodes such as gnode[10,20-23]";
                Err(EnvironmentProblem::value("SLURM_STEP_NODELIST", &list, allowed))
            }
        });
        let leader = leader.transpose()?;
        let names = ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", name];
        let numbers = [rank, world_size, local_rank, local_size];
        Ok(Some(ProcessPlace { leader, ..place_of(launcher, names, numbers)? }))
    }

    fn kubernetes(&self) -> Result<Option<ProcessPlace>, EnvironmentProblem> {
        let Some(rank) = self.number("JOB_COMPLETION_INDEX")? else { return Ok(None) };
        let launcher = Launcher::Kubernetes;
        let leader = self.leader()?;
        let (local_rank, local_size) = (Some(0), Some(1));
        Ok(Some(ProcessPlace { launcher, rank, world_size: None, local_rank, local_size, leader }))
    }

    fn four_numbers(
        &self,
        launcher: Launcher,
        names: Names,
    ) -> Result<Option<ProcessPlace>, EnvironmentProblem> {
        let [rank, world_size, local_rank, local_size] = names.map(|name| self.number(name));
        match [rank?, world_size?, local_rank?, local_size?] {
            [Some(rank), Some(world_size), Some(local_rank), Some(local_size)] => {
                place_of(launcher, names, [rank, world_size, local_rank, local_size]).map(Some)
            }
            numbers => {
                let present = numbers.iter().position(Option::is_some);
                let missing = numbers.iter().position(Option::is_none);
                present.zip(missing).map_or(Ok(None), |(present, missing)| {
                    Err(EnvironmentProblem::incomplete(launcher, names[present], names[missing]))
                })
            }
        }
    }

    fn leader(&self) -> Result<Option<Leader>, EnvironmentProblem> {
        let Some(host) = self.get("MASTER_ADDR") else { return Ok(None) };
        let variable = "MASTER_PORT";
        let port = self.get(variable).map(|value| match value.parse::<u16>() {
            Ok(number) if number > 0 => Ok(number),
            _ => Err(EnvironmentProblem::value(variable, &value, "1 to 65535")),
        });
        Ok(Some(Leader { host, port: port.transpose()? }))
    }

    /// Returns the value of a variable that is set and not empty.
    fn get(&self, variable: &str) -> Option<String> {
        (self.variable)(variable).filter(|value| !value.is_empty())
    }

    fn number(&self, variable: &'static str) -> Result<Option<usize>, EnvironmentProblem> {
        let Some(value) = self.get(variable) else { return Ok(None) };
        match value.parse::<usize>() {
            Ok(number) if number <= MAX_WORLD => Ok(Some(number)),
            _ => Err(EnvironmentProblem::value(variable, &value, &format!("0 to {MAX_WORLD}"))),
        }
    }
}

/// Returns the place that the four numbers of a launcher describe, after checking that ranks are below sizes.
fn place_of(
    launcher: Launcher,
    names: Names,
    [rank, world_size, local_rank, local_size]: [usize; 4],
) -> Result<ProcessPlace, EnvironmentProblem> {
    let invalid = |index: usize, value: usize, allowed: String| {
        Err(EnvironmentProblem::value(names[index], &value.to_string(), &allowed))
    };
    if rank >= world_size {
        return invalid(0, rank, format!("below {}={world_size}", names[1]));
    }
    if local_rank >= local_size {
        return invalid(2, local_rank, format!("below {}={local_size}", names[3]));
    }
    if local_size > world_size {
        return invalid(3, local_size, format!("at most {}={world_size}", names[1]));
    }
    let (world_size, local_rank, local_size) = (Some(world_size), Some(local_rank), Some(local_size));
    Ok(ProcessPlace { launcher, rank, world_size, local_rank, local_size, leader: None })
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    /// Detects the place in an environment written as `A=1 B=2`.
    fn detect_in(text: &str) -> Result<Option<ProcessPlace>, EnvironmentProblem> {
        let pairs = text.split_whitespace().filter_map(|pair| pair.split_once('='));
        let variables: HashMap<&str, &str> = pairs.collect();
        detect(&|name| variables.get(name).map(|value| (*value).to_owned()))
    }

    const OURS: &str = "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4";
    const OMPI: &str = "OMPI_COMM_WORLD_RANK=5 OMPI_COMM_WORLD_SIZE=8 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=4";
    const HYDRA: &str = "PMI_RANK=5 PMI_SIZE=8 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=4";
    const STEP: &str = "SLURM_STEP_ID=0 SLURM_PROCID=5 SLURM_NTASKS=8 SLURM_LOCALID=1 SLURM_NODEID=1 \
                        SLURM_STEP_TASKS_PER_NODE=4(x2) SLURM_STEP_NODELIST=gnode[08,11-13]";

    #[test]
    fn each_launcher_is_understood_and_the_innermost_counts() {
        let table: [(String, Option<Launcher>); 14] = [
            (String::new(), None),
            (OURS.to_owned(), Some(Launcher::Torchrun)),
            (OMPI.to_owned(), Some(Launcher::OpenMpi)),
            (HYDRA.to_owned(), Some(Launcher::Mpich)),
            (STEP.to_owned(), Some(Launcher::Slurm)),
            ("RANK=5 WORLD_SIZE=8".to_owned(), Some(Launcher::Torchrun)),
            ("RANK=5 WORLD_SIZE=8 LOCAL_RANK=1".to_owned(), Some(Launcher::Torchrun)),
            ("RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_SIZE=4".to_owned(), Some(Launcher::Torchrun)),
            // In Kubeflow's PyTorchJob, `RANK` is the number of a machine.
            ("RANK=1 WORLD_SIZE=2 PET_NNODES=2 PET_NODE_RANK=1".to_owned(), None),
            ("JOB_COMPLETION_INDEX=5".to_owned(), Some(Launcher::Kubernetes)),
            (format!("{OURS} {OMPI} {STEP}"), Some(Launcher::Torchrun)),
            (format!("{OMPI} {STEP}"), Some(Launcher::OpenMpi)),
            // srun with PMI2 sets these two.
            (format!("PMI_RANK=5 PMI_SIZE=8 {STEP}"), Some(Launcher::Slurm)),
            (format!("{STEP} JOB_COMPLETION_INDEX=3"), Some(Launcher::Slurm)),
        ];
        for (environment, launcher) in table {
            let place = detect_in(&environment).unwrap();
            assert_eq!(place.as_ref().map(|place| place.launcher), launcher, "{environment}");
            assert!(place.is_none_or(|place| place.rank == 5), "{environment}");
        }
        let place = detect_in(STEP).unwrap().unwrap();
        assert_eq!((place.world_size, place.local_size), (Some(8), Some(4)));
        let local_sizes = [("", None), (" LOCAL_RANK=1", None), (" LOCAL_RANK=1 LOCAL_SIZE=4", Some(4))];
        for (more, expected) in local_sizes {
            let place = detect_in(&format!("RANK=5 WORLD_SIZE=8{more}")).unwrap().unwrap();
            assert_eq!(place.local_size, expected, "{more}");
        }
        assert_eq!(place.leader, Some(Leader { host: "gnode08".to_owned(), port: None }));
        let place = detect_in(&format!("{OURS} MASTER_ADDR=node1 MASTER_PORT=29500")).unwrap().unwrap();
        assert_eq!(place.leader, Some(Leader { host: "node1".to_owned(), port: Some(29500) }));
    }

    #[test]
    fn the_shell_of_an_allocation_is_no_rank() {
        for shell in ["SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_LOCALID=0", &format!("{STEP} SLURM_JOB_NAME=bash")]
        {
            assert_eq!(detect_in(shell), Ok(None), "{shell}");
        }
    }

    #[test]
    fn what_cannot_be_is_told_with_its_variable() {
        let table = [
            (
                "RANK=8 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4",
                "RANK=\"8\": allowed is below WORLD_SIZE=8",
            ),
            (
                "RANK=5 WORLD_SIZE=8 LOCAL_RANK=4 LOCAL_WORLD_SIZE=4",
                "LOCAL_RANK=\"4\": allowed is below LOCAL_WORLD_SIZE=4",
            ),
            (
                "RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4",
                "LOCAL_WORLD_SIZE=\"4\": allowed is at most WORLD_SIZE=2",
            ),
            ("RANK=-1 WORLD_SIZE=2", "RANK=\"-1\": allowed is 0 to 65536"),
            ("RANK=0 WORLD_SIZE=99999999", "WORLD_SIZE=\"99999999\": allowed is 0 to 65536"),
            ("RANK=0", "RANK is set, but WORLD_SIZE is not (torchrun)"),
            ("WORLD_SIZE=2", "WORLD_SIZE is set, but RANK is not (torchrun)"),
            ("LOCAL_RANK=0", "LOCAL_RANK is set, but RANK is not (torchrun)"),
            ("RANK=0 WORLD_SIZE=2 LOCAL_RANK=2", "LOCAL_RANK=\"2\": allowed is below WORLD_SIZE=2"),
            ("RANK=0 WORLD_SIZE=2 LOCAL_SIZE=2", "RANK is set, but LOCAL_RANK is not (torchrun)"),
            ("PMI_RANK=0 PMI_SIZE=2", "PMI_RANK is set, but MPI_LOCALRANKID is not (MPICH)"),
            ("SLURM_STEP_ID=0 SLURM_PROCID=0", "SLURM_PROCID is set, but SLURM_NTASKS is not (SLURM)"),
        ];
        for (environment, message) in table {
            assert_eq!(detect_in(environment).unwrap_err().to_string(), message, "{environment}");
        }
        let port = format!("{OURS} MASTER_ADDR=a MASTER_PORT=0");
        assert_eq!(detect_in(&port).unwrap_err().to_string(), "MASTER_PORT=\"0\": allowed is 1 to 65535");
        let nodes = STEP.replace("gnode[08,11-13]", "gnode[08");
        assert!(detect_in(&nodes).unwrap_err().to_string().contains("SLURM_STEP_NODELIST=\"gnode[08\""));
        let tasks = STEP.replace("4(x2)", "8");
        assert!(detect_in(&tasks).unwrap_err().to_string().contains("that has a node 1"));
    }

    #[test]
    fn two_launchers_of_one_rank_that_differ_are_an_error() {
        let environment = format!("{} {HYDRA}", OURS.replace("RANK=5 ", "RANK=2 "));
        assert_eq!(
            detect_in(&environment).unwrap_err().to_string(),
            "torchrun says rank 2 of 8, MPICH says rank 5 of 8: unset the variables of one of them"
        );
    }
}
