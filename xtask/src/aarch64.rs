//! Kernel tests for AArch64, cross-compiled and run under QEMU's emulation of a process.
//!
//! Emulation shows that results are right, and nothing about speed. The standard library for the target is that of rustup, if it is
//! installed; otherwise Debian's compiler is unpacked below the target directory, where it meets no other one. If linker,
//! emulator or library are missing, CI installs the distribution's if it may, and otherwise reports what was not tested.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::{env, fs};

use crate::step::{BACKGROUND_LIMIT, run_within};

/// The target of the tests.
pub(crate) const TARGET: &str = "aarch64-unknown-linux-gnu";

const LINKER: &str = "aarch64-linux-gnu-gcc";
/// QEMU, with a CPU that has every extension it knows, and the libraries that come with the linker.
const RUNNER: &str = "qemu-aarch64 -cpu max -L /usr/aarch64-linux-gnu";

/// Tests that hold the kernels of each level to their references: products, attention, norms, losses, optimizers and conversions. Of
/// kernels without intrinsics one or two tests: the compiler's loops are those of every machine, and emulation is slow.
const TESTS: &str = "cpu::simd gemm::products::every gemm::products::random gemm::products::a_part \
    gemm::products::nan gemm::neon gemm::quantized::a_product_with_int8 gemm::quantized::products_with_interleaved \
    gemm::convolutions::convolutions cpu::attention::lanes attention::kernels::a_window attention::kernels::one_document \
    attention::pages::any norm::rms loss::losses cast:: optimizer::";

/// Packages of Debian's compiler: itself and the standard libraries of both machines.
const COMPILER: [&str; 3] = ["rustc-web", "libstd-rust-web-dev:amd64", "libstd-rust-web-dev:arm64"];

/// Settings of the profile. Under debug assertions each load and store of an intrinsic checks its address, which takes longer
/// than the kernels do; natively these checks run with the other tests. Only kernels need to be fast: at `opt-level = 1` their
/// tests take 3.5 times as long, and their build 15 % less.
const PROFILE: [(&str, &str); 4] = [
    ("CARGO_PROFILE_DEV_DEBUG_ASSERTIONS", "false"),
    ("CARGO_PROFILE_DEV_OVERFLOW_CHECKS", "true"),
    ("CARGO_PROFILE_DEV_DEBUG", "false"),
    ("CARGO_PROFILE_DEV_OPT_LEVEL", "0"),
];

/// Runs [`check`] after installing what is missing; reports it if that is not possible.
pub(crate) fn check_if_possible() -> Result<(), String> {
    if cfg!(target_arch = "aarch64") {
        // The workspace's tests have run the kernels on the machine itself.
        return Ok(());
    }
    let missing = || [LINKER, "qemu-aarch64"].into_iter().find(|program| !can_run(program));
    if missing().is_some() {
        println!("== installing a linker and an emulator for {TARGET}");
        let apt = |arguments: &[&str]| {
            Command::new("apt-get").args(arguments).env("DEBIAN_FRONTEND", "noninteractive").status()
        };
        let _ = apt(&["update", "-qq"]);
        let _ = apt(&[
            "install",
            "-qqy",
            "--no-install-recommends",
            "gcc-aarch64-linux-gnu",
            "libc6-dev-arm64-cross",
            "qemu-user",
        ]);
    }
    if let Some(program) = missing() {
        println!("== NOT TESTED: kernels for AArch64; there is no {program}, nor could it be installed");
        return Ok(());
    }
    match Compiler::find() {
        Ok(compiler) => test(&compiler),
        Err(error) => {
            println!("== NOT TESTED: kernels for AArch64; no standard library for {TARGET}: {error}");
            Ok(())
        }
    }
}

/// Runs the tests.
///
/// # Errors
/// If a tool is missing or a test fails.
pub(crate) fn check() -> Result<(), String> {
    if let Some(program) = [LINKER, "qemu-aarch64"].into_iter().find(|program| !can_run(program)) {
        return Err(format!(
            "there is no {program}; on Debian: apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user"
        ));
    }
    test(&Compiler::find()?)
}

fn test(compiler: &Compiler) -> Result<(), String> {
    let build = directory()?.join("build");
    let mut environment = vec![
        // A directory of its own: CI runs these tests beside others, and cargo locks the directory while it builds.
        // Programs that run while others are built also differ between the compilers.
        ("CARGO_TARGET_DIR", path(&build)),
        ("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", LINKER.to_owned()),
        ("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER", RUNNER.to_owned()),
    ];
    if let Compiler::Debian(root) = compiler {
        environment.extend([
            ("RUSTC", path(&root.join("usr/bin/rustc"))),
            ("LD_LIBRARY_PATH", path(&root.join("usr/lib/x86_64-linux-gnu"))),
        ]);
    }
    let environment = environment.iter().map(|(name, value)| (*name, value.as_str())).chain(PROFILE);
    let environment: Vec<(&str, &str)> = environment.collect();
    run_within(
        BACKGROUND_LIMIT,
        &format!("cargo test --package lockstep-tensor --lib --test tensor --target {TARGET} -- {TESTS}"),
        &environment,
    )
}

/// A compiler with the standard library of the target.
enum Compiler {
    /// The one in use.
    Rustup,
    /// Debian's, unpacked into a directory.
    Debian(PathBuf),
}

impl Compiler {
    /// Finds the compiler, or downloads Debian's.
    ///
    /// # Errors
    /// If rustup has no standard library for the target, and Debian's compiler cannot be had or is too old.
    fn find() -> Result<Self, String> {
        if is_installed(TARGET) {
            return Ok(Self::Rustup);
        }
        let dir = directory()?;
        let root = dir.join("debian");
        if !root.exists() {
            println!("== unpacking Debian's compiler into {}", root.display());
            let staged = dir.join("staged");
            let failed = |error: std::io::Error| format!("{}: {error}", staged.display());
            if staged.exists() {
                fs::remove_dir_all(&staged).map_err(failed)?;
            }
            fs::create_dir_all(&staged).map_err(failed)?;
            download(&staged).and_then(|()| is_new_enough(&staged))?;
            fs::rename(&staged, &root).map_err(failed)?;
        }
        Ok(Self::Debian(root))
    }
}

/// Returns the directory of the compiler and of the build, below the target directory.
fn directory() -> Result<PathBuf, String> {
    let target_dir = env::var_os("CARGO_TARGET_DIR").map_or_else(|| PathBuf::from("target"), PathBuf::from);
    std::path::absolute(target_dir.join("aarch64")).map_err(|error| error.to_string())
}

/// Returns true if rustup has the standard library of `target`.
pub(crate) fn is_installed(target: &str) -> bool {
    let listed = Command::new("rustup").args(["target", "list", "--installed"]).output();
    listed.is_ok_and(|output| String::from_utf8_lossy(&output.stdout).lines().any(|line| line == target))
}

/// Downloads Debian's compiler and unpacks it into `root`. Lists of packages for both machines are kept there, so that the
/// system's package manager changes nothing.
fn download(root: &Path) -> Result<(), String> {
    let apt = root.join("apt");
    let archives = apt.join("archives");
    let failed = |error: std::io::Error| format!("{}: {error}", apt.display());
    for part in ["lists/partial", "archives/partial"] {
        fs::create_dir_all(apt.join(part)).map_err(failed)?;
    }
    let configuration = apt.join("apt.conf");
    let place = path(&apt);
    let text = format!(
        "APT::Architectures {{ \"amd64\"; \"arm64\"; }};\nAPT::Sandbox::User \"root\";\nDir::State \"{place}\";\n\
         Dir::State::status \"/var/lib/dpkg/status\";\nDir::Cache \"{place}\";\n"
    );
    fs::write(&configuration, text).map_err(failed)?;
    let tell = |program: &str, arguments: &[&str]| {
        output(Command::new(program).args(arguments).env("APT_CONFIG", &configuration).current_dir(&archives))
    };
    tell("apt-get", &["-qq", "update"])?;
    let depends =
        ["depends", "--recurse", "--no-recommends", "--no-suggests", "--no-conflicts", "--no-breaks"];
    let depends =
        tell("apt-cache", &[&depends[..], &["--no-replaces", "--no-enhances", COMPILER[0]]].concat())?;
    // The libraries of the compiler that the system may lack.
    let own = |line: &&str| line.starts_with("libllvm") || line.starts_with("libstd-rust-web-1");
    let mut packages = COMPILER.to_vec();
    packages.extend(depends.lines().filter(own).filter(|name| !name.contains(':')));
    tell("apt-get", &[&["-qq", "download"], &packages[..]].concat())?;
    for archive in fs::read_dir(&archives).map_err(failed)? {
        let archive = archive.map_err(failed)?.path();
        if archive.extension().is_some_and(|extension| extension == "deb") {
            output(Command::new("dpkg-deb").arg("--extract").arg(&archive).arg(root))?;
        }
    }
    fs::remove_dir_all(&apt).map_err(failed)
}

/// Checks that the compiler in `root` runs, and is not older than the workspace demands.
fn is_new_enough(root: &Path) -> Result<(), String> {
    let mut rustc = Command::new(root.join("usr/bin/rustc"));
    let said = output(rustc.arg("--version").env("LD_LIBRARY_PATH", root.join("usr/lib/x86_64-linux-gnu")))?;
    let minor = |version: &str| version.split('.').nth(1).and_then(|minor| minor.parse::<u32>().ok());
    let demanded = env!("CARGO_PKG_RUST_VERSION");
    if minor(&said) >= minor(demanded) {
        return Ok(());
    }
    Err(format!("Debian has {}, and {demanded} is needed", said.trim()))
}

/// Runs a command to its end and returns what it prints.
fn output(command: &mut Command) -> Result<String, String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let done =
        command.stdin(Stdio::null()).output().map_err(|error| format!("cannot run {name}: {error}"))?;
    if !done.status.success() {
        let said = String::from_utf8_lossy(&done.stderr);
        return Err(format!("{name}: {}", said.lines().last().unwrap_or("failed").trim()));
    }
    Ok(String::from_utf8_lossy(&done.stdout).into_owned())
}

fn can_run(program: &str) -> bool {
    Command::new(program).arg("--version").output().is_ok_and(|output| output.status.success())
}

fn path(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}
