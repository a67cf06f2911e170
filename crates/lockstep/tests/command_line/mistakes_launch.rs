//! Invalid or contradictory flags and variables for starting ranks: refused with code 2 and one message that names the remedy,
//! before anything is written.

use std::net::TcpListener;

use crate::workshop::Workshop;

const PROGRAM: &str = env!("CARGO_BIN_EXE_lockstep");

/// Variables, arguments after `train run.toml`, the exit code, and parts of the message.
struct Mistake {
    variables: &'static str,
    arguments: &'static str,
    code: i32,
    parts: &'static [&'static str],
}

const fn mistake(
    variables: &'static str,
    arguments: &'static str,
    parts: &'static [&'static str],
) -> Mistake {
    Mistake { variables, arguments, code: 2, parts }
}

const NODES: &str = "--nnodes 2 --rdzv-endpoint 127.0.0.1:29397";

const MISTAKES: [Mistake; 36] = [
    // Mistakes in flags alone.
    mistake("", "--nproc-per-node 0", &["--nproc-per-node 0", "a number from 1, auto, cpu"]),
    mistake("", "--nproc_per_node=two", &["--nproc-per-node two", "auto"]),
    Mistake {
        variables: "",
        arguments: "--nproc-per-node gpu",
        code: 3,
        parts: &["--nproc-per-node gpu", "computes on the processor", "take auto, cpu or a number"],
    },
    mistake("", "--nnodes 2", &["--rdzv-endpoint HOST:PORT", "every machine"]),
    mistake("", "--nnodes 1:4", &["elastic", "give one number"]),
    mistake("", "--nnodes 0", &["a number from 1"]),
    mistake("", "--node-rank 1", &["node 1", "below the number of nodes, 1", "--nnodes"]),
    mistake("", "--standalone --nnodes 2", &["--standalone is one machine", "leave one of them out"]),
    mistake("", "--standalone --node_rank 3", &["node 3", "--nnodes"]),
    mistake("", "--rdzv-backend etcd-v2", &["no etcd server", "c10d"]),
    mistake("", "--rdzv_backend=zeus", &["zeus", "c10d or static"]),
    mistake("", "--rdzv-conf join_timout=5", &["join_timout", "join_timeout, timeout, rank and is_host"]),
    mistake("", "--rdzv-conf timeout=soon", &["timeout is a number from 1"]),
    mistake("", "--rdzv-conf rank", &["KEY=VALUE"]),
    mistake("", "--rdzv-endpoint node1:port", &["--rdzv-endpoint node1:port", "node1:29400"]),
    mistake(
        "",
        "--rdzv-endpoint a:1 --master-addr b",
        &["--rdzv-endpoint", "--master-addr", "cannot be used with"],
    ),
    mistake("", "--master-port 70000", &["70000", "65535"]),
    mistake("", "--max-restarts many", &["--max-restarts many", "0 to 1000"]),
    mistake("", "--max-restarts 2 --resume never", &["--max-restarts", "leave --resume out"]),
    mistake("", "--tee 4", &["--tee 4", "3 (both)", "0:3,1:1"]),
    mistake("", "--redirects 0:3;1:1", &["--redirects", "by local rank"]),
    mistake("", "--nproc-per-node 2 --tee 2:3", &["--tee names local rank 2", "ranks 0 to 1"]),
    mistake("", "--nproc-per-node 2 --local-ranks-filter 5", &["local rank 5", "ranks 0 to 1"]),
    mistake("", "--role a/b", &["--role a/b", "letters, digits"]),
    mistake("", "--run-path", &["Python", "leave --run-path out"]),
    mistake(
        "",
        "--pairing-code K7QX2 --rdzv-endpoint 127.0.0.1",
        &["pairing code is not one", "node 0 prints"],
    ),
    mistake(
        "",
        "--pairing-code x --secret-file y",
        &["--pairing-code", "--secret-file", "cannot be used with"],
    ),
    // Mistakes in variables alone.
    mistake("PET_NNODES=1:3", "", &["PET_NNODES=1:3", "give one number"]),
    mistake("PET_STANDALONE=yes", "", &["PET_STANDALONE=yes", "0 to 1"]),
    mistake("PET_RDZV_BACKEND=etcd", "", &["PET_RDZV_BACKEND=etcd", "c10d"]),
    mistake("RANK=2 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1", "", &["RANK=\"2\"", "below WORLD_SIZE=2"]),
    mistake("WORLD_SIZE=2", "", &["WORLD_SIZE is set, but RANK is not"]),
    // Contradictions of flags and variables.
    mistake(
        "PET_NNODES=2",
        "--rdzv-endpoint 127.0.0.1 --node-rank 0 --rdzv-conf rank=1",
        &["--node-rank says node 0", "--rdzv-conf node 1", "leave one of them out"],
    ),
    mistake(
        "RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1",
        "--nproc-per-node 2",
        &[
            "--nproc-per-node asks for ranks",
            "rank 0 of 2, started by torchrun",
            "leave --nproc-per-node out",
        ],
    ),
    mistake(
        "RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2",
        NODES,
        &["--nnodes asks for ranks", "started by torchrun"],
    ),
    // Machines that nobody answers for.
    mistake(
        "",
        "--nnodes 2 --node-rank 1 --rdzv-conf join_timeout=1 --rdzv-endpoint 127.0.0.1:29396",
        &["no answer for 1 s", "is rank 0 (or node 0) of this run started"],
    ),
];

#[test]
fn mistakes_about_starting_ranks_name_the_way_out_and_leave_nothing() {
    let workshop = Workshop::new();
    for Mistake { variables, arguments, code, parts } in MISTAKES {
        let arguments: Vec<&str> =
            ["train", "run.toml"].into_iter().chain(arguments.split_whitespace()).collect();
        let variables: Vec<_> =
            variables.split_whitespace().map(|pair| pair.split_once('=').unwrap()).collect();
        workshop.start_in(PROGRAM, &arguments, &variables).finish().refuses(code, parts);
    }
    // The other machine is never started.
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let endpoint = format!("127.0.0.1:{port}");
    let alone =
        ["--nnodes", "2", "--node-rank", "0", "--rdzv-conf", "timeout=1", "--rdzv-endpoint", &endpoint];
    workshop
        .run(&[&["train", "run.toml"], &alone[..]].concat())
        .refuses(2, &["node 1 did not come within 1 s", "can they reach this machine"]);
    for dir in ["checkpoints", "runs"] {
        assert!(!workshop.path(dir).exists(), "a run that is refused leaves no {dir}");
    }
}
