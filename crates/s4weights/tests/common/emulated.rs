//! Runs a program's tests again on a driver that emulates a device, where there is no real one.

use std::path::Path;
use std::process::Command;

/// Set for the program that runs on the emulated driver.
const INSIDE: &str = "S4_EMULATED_DRIVER";

/// Builds the driver's library, and runs this program with it.
pub(crate) fn run_all() {
    if std::env::var_os(INSIDE).is_some() || !cfg!(target_os = "linux") {
        return;
    }
    if s4_codec_gpu::Cuda::discover().is_ok() {
        println!("skipped: there is a CUDA device");
        return;
    }
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let folder = tempfile::tempdir().unwrap();
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".into());
    let built = Command::new(&compiler)
        .args(["-std=c++17", "-O2", "-g", "-shared", "-fPIC", "-fvisibility=hidden"])
        .args(["-Wno-unknown-pragmas", "-Wno-parentheses", "-x", "c++", "-I"])
        .arg(crates.join("s4-codec-gpu/kernels"))
        .arg(crates.join("s4-engine/tests/cuda/emulated/driver.cpp"))
        .arg("-o")
        .arg(folder.path().join("libcuda.so.1"))
        .output();
    let built = built.unwrap_or_else(|e| panic!("{compiler}: {e}"));
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let ran = Command::new(std::env::current_exe().unwrap())
        .args(["--test-threads=1", "--nocapture"])
        .env("LD_LIBRARY_PATH", folder.path())
        .env("S4_REQUIRE_GPU", "1")
        .env(INSIDE, "1")
        .output()
        .unwrap();
    let (out, err) = (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    assert!(ran.status.success(), "{out}\n{err}");
    assert!(!out.contains("skipped"), "{out}");
}
