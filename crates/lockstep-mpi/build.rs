//! With the feature `mpi`, compiles the C shim with `mpicc` and links the libraries that `mpicc` links; otherwise does nothing.

use std::{env, path::Path, process::Command};

const SOURCE: &str = "src/shim.c";

fn main() -> Result<(), String> {
    println!("cargo:rerun-if-changed={SOURCE}");
    println!("cargo:rerun-if-env-changed=MPICC");
    if env::var_os("CARGO_FEATURE_MPI").is_none() {
        return Ok(());
    }
    let mpicc = env::var("MPICC").unwrap_or_else(|_| "mpicc".to_owned());
    let out = env::var("OUT_DIR").map_err(|error| format!("OUT_DIR: {error}"))?;
    let object = Path::new(&out).join("shim.o");
    let library = Path::new(&out).join("liblockstep_mpi.a");
    let object = object.to_string_lossy();
    run(&mpicc, &["-O2", "-fPIC", "-std=c11", "-Wall", "-Wextra", "-Werror", "-c", SOURCE, "-o", &object])?;
    run("ar", &["crs", &library.to_string_lossy(), &object])?;
    println!("cargo:rustc-link-search=native={out}");
    println!("cargo:rustc-link-lib=static=lockstep_mpi");
    // The wrappers of both OpenMPI and MPICH print the command that they would run.
    for word in run(&mpicc, &["-show"])?.split_whitespace() {
        if let Some(directory) = word.strip_prefix("-L") {
            println!("cargo:rustc-link-search=native={directory}");
        } else if let Some(library) = word.strip_prefix("-l") {
            println!("cargo:rustc-link-lib=dylib={library}");
        } else if let Some((_, directory)) = word.split_once("-rpath,").or_else(|| word.split_once("-rpath="))
        {
            let directory = directory.trim_start_matches("-Wl,");
            println!("cargo:warning=MPI's library is found at run time with LD_LIBRARY_PATH={directory}");
        }
    }
    Ok(())
}

/// Runs a command and returns its standard output.
fn run(program: &str, arguments: &[&str]) -> Result<String, String> {
    let next = "install OpenMPI or MPICH with its headers (Debian: libopenmpi-dev), or name the compiler of another one by MPICC";
    let output = Command::new(program).args(arguments).output();
    let output = output.map_err(|error| {
        format!("the feature `mpi` needs {program}, which cannot be run: {error}; {next}")
    })?;
    if !output.status.success() {
        let words = String::from_utf8_lossy(&output.stderr);
        return Err(format!("{program} {} failed; {next}\n{words}", arguments.join(" ")));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
