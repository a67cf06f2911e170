//! Runs on other machines with `--hostfile`, all of which are this one: through a stand-in for ssh, and over ssh itself if there
//! is an sshd.

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::workshop::{Started, Workshop};

const PROGRAM: &str = env!("CARGO_BIN_EXE_lockstep");

/// Returns a directory with a hostfile of two machines, and a program that runs commands as ssh does and records its arguments.
fn workshop() -> Workshop {
    let workshop = Workshop::new();
    workshop.write("hosts", "127.0.0.1 slots=1\nlocalhost slots=1\n");
    script(&workshop, "ssh", "echo \"$4\" \"$5\" >> asked; exec sh -c \"$5\"");
    script(&workshop, "no-ssh", "exit 255");
    workshop
}

fn script(workshop: &Workshop, name: &str, text: &str) {
    workshop.write(name, format!("#!/bin/sh\n{text}\n"));
    std::fs::set_permissions(workshop.path(name), std::fs::Permissions::from_mode(0o755)).unwrap();
}

fn start(workshop: &Workshop, arguments: &[&str]) -> Started {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
    let ssh: &[&str] = if arguments.contains(&"--ssh") { &[] } else { &["--ssh", "./ssh"] };
    let all = ["train", "run.toml", "--hostfile", "hosts", "--master_port", &port];
    workshop.start(PROGRAM, &[&all[..], ssh, arguments].concat())
}

#[test]
fn a_hostfile_starts_all_machines_with_a_secret_that_no_command_line_shows() {
    let workshop = workshop();
    let outcome = start(&workshop, &["--set", "train.seed=7"]).finish().succeeds();
    assert!(outcome.stderr.contains("hosts      127.0.0.1 (1), localhost (1)"), "{outcome:?}");
    assert!(outcome.stderr.contains("2 ranks × 1 micro-batch of 2"), "{outcome:?}");
    let asked = String::from_utf8(workshop.read("asked")).unwrap();
    assert_eq!(asked.lines().count(), 2, "{asked}");
    assert_eq!(asked.matches("--set train.seed=7 --nnodes=2 --node-rank=").count(), 2, "{asked}");
    assert_eq!(asked.matches("--secret-file=-").count(), 2, "{asked}");
    assert!(!asked.contains("hostfile") && !asked.contains("pairing"), "{asked}");
}

#[test]
fn a_signal_ends_all_machines_with_a_checkpoint() {
    let workshop = workshop();
    let many = ["--set", "train.steps=1000000", "--set", "checkpoint.every=1000000"];
    let mut run = start(&workshop, &many);
    run.wait_until("a step", |run| run.stderr().contains("\nstep "));
    kill_process(Pid::from_raw(run.child.id().cast_signed()).unwrap(), Signal::TERM).unwrap();
    let outcome = run.finish();
    assert_eq!(outcome.code, Some(75), "{outcome:?}");
    assert!(outcome.stderr.contains("interrupted at step"), "{outcome:?}");
}

#[test]
fn hosts_that_cannot_be_are_told() {
    let workshop = workshop();
    let refused = |arguments: &[&str], parts: &[&str]| {
        workshop.run(&[&["train", "run.toml"], arguments].concat()).refuses(2, parts);
    };
    refused(&["--include", "h1"], &["--include", "--hostfile"]);
    refused(&["--hostfile", "nowhere"], &["nowhere", "No such file"]);
    refused(&["--hostfile", "hosts", "--include", "h9"], &["no host \"h9\"", "127.0.0.1, localhost"]);
    refused(&["--hostfile", "hosts", "--nnodes", "2"], &["leave --nnodes out"]);
    refused(&["--hostfile", "hosts", "--nproc-per-node", "2"], &["--num-gpus"]);
    refused(&["--hostfile", "hosts", "--ssh", "./none"], &["./none", "127.0.0.1", "--ssh"]);
    workshop.write("wrong", "worker-1 slots=two\n");
    refused(&["--hostfile", "wrong"], &["wrong: line 1", "HOST slots=N"]);
    let unreachable = ["train", "run.toml", "--hostfile", "hosts", "--ssh", "./no-ssh"];
    workshop
        .run(&unreachable)
        .fails(2, &["127.0.0.1, localhost cannot be reached by ssh", "without a password"]);
    assert!(!workshop.path("checkpoints").exists());
}

/// An sshd of this test on a loopback port; killed when dropped.
struct Sshd(Child);

impl Drop for Sshd {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts an sshd that accepts one key, and writes `ssh-here`, which connects to it as ssh does to a host; `None` if there is no
/// sshd.
fn sshd(workshop: &Workshop) -> Option<Sshd> {
    let program =
        ["/usr/sbin/sshd", "/usr/bin/sshd"].into_iter().find(|path| std::path::Path::new(path).exists())?;
    for key in ["host-key", "user-key"] {
        let made = Command::new("ssh-keygen")
            .args(["-q", "-t", "ed25519", "-N", "", "-f"])
            .arg(workshop.path(key))
            .stdin(Stdio::null())
            .status();
        made.ok().filter(|status| status.success())?;
    }
    if rustix::process::geteuid().is_root() {
        // sshd requires this directory.
        std::fs::create_dir_all("/run/sshd").ok()?;
    }
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let at = |name: &str| workshop.path(name).display().to_string();
    let settings = format!(
        "ListenAddress 127.0.0.1:{port}\nHostKey {}\nAuthorizedKeysFile {}\nStrictModes no\nUsePAM no\nPidFile none\n\
         PasswordAuthentication no\nPermitRootLogin prohibit-password\n",
        at("host-key"),
        at("user-key.pub"),
    );
    workshop.write("sshd_config", settings);
    let host_key = String::from_utf8(workshop.read("host-key.pub")).unwrap();
    workshop.write("known", format!("here {host_key}"));
    let options = format!(
        "Port {port}\nIdentityFile {}\nIdentitiesOnly yes\nUserKnownHostsFile {}\nHostKeyAlias here\nStrictHostKeyChecking yes\n",
        at("user-key"),
        at("known"),
    );
    workshop.write("ssh_config", options);
    script(workshop, "ssh-here", &format!("exec ssh -F {} \"$@\"", at("ssh_config")));
    let child = Command::new(program)
        .args(["-D", "-f", &at("sshd_config"), "-E", &at("sshd.log")])
        .stdin(Stdio::null())
        .spawn()
        .ok()?;
    let sshd = Sshd(child);
    let begin = Instant::now();
    while TcpStream::connect(("127.0.0.1", port)).is_err() {
        if begin.elapsed() > Duration::from_secs(10) {
            panic!("sshd does not listen: {}", String::from_utf8_lossy(&workshop.read("sshd.log")));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Some(sshd)
}

#[test]
fn a_hostfile_starts_ranks_over_ssh_and_a_signal_saves_on_all_hosts() {
    let workshop = workshop();
    let Some(_sshd) = sshd(&workshop) else {
        // Written directly, because the test harness hides the output of tests that pass.
        let _ = writeln!(std::io::stderr(), "SKIPPED: a run over ssh needs openssh-server");
        return;
    };
    let outcome = start(&workshop, &["--ssh", "./ssh-here", "--steps", "2"]).finish().succeeds();
    assert!(outcome.stderr.contains("2 ranks × 1 micro-batch of 2"), "{outcome:?}");
    let many = ["--ssh", "./ssh-here", "--resume", "never", "--set", "train.steps=1000000"];
    let mut run = start(&workshop, &many);
    run.wait_until("a step", |run| run.stderr().contains("\nstep "));
    kill_process(Pid::from_raw(run.child.id().cast_signed()).unwrap(), Signal::INT).unwrap();
    let outcome = run.finish();
    assert_eq!(outcome.code, Some(75), "{outcome:?}");
    assert!(outcome.stderr.contains("interrupted at step"), "{outcome:?}");
}
