//! Runs the tests again on a driver that emulates a device, with a stand-in for nvCOMP, if there is none.

use std::path::Path;
use std::process::Command;

/// Set for the program that runs on the emulated driver.
const INSIDE: &str = "S4_EMULATED_DRIVER";

/// Builds a library from a source of this folder.
fn build(source: &str, library: &Path) {
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("../s4-engine/tests/cuda/emulated");
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".into());
    let built = Command::new(&compiler)
        .args(["-std=c++17", "-O2", "-g", "-shared", "-fPIC", "-fvisibility=hidden"])
        .args(["-Wno-unknown-pragmas", "-Wno-parentheses", "-x", "c++", "-I"])
        .arg(here.join("../../../../s4-codec-gpu/kernels"))
        .arg(here.join(source))
        .arg("-o")
        .arg(library)
        .output();
    // As the kernels' own emulated tests do: a C++ compiler builds other dependencies anyway.
    let built = built.unwrap_or_else(|e| panic!("{compiler}: {e}"));
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
}

/// Builds the driver's library and nvCOMP's, and runs this test program again with them.
pub(crate) fn run(arguments: &[&str]) {
    if std::env::var_os(INSIDE).is_some() || !cfg!(target_os = "linux") {
        return;
    }
    if s4_codec_gpu::Cuda::discover().is_ok() {
        println!("skipped: there is a CUDA device");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    build("driver.cpp", &folder.path().join("libcuda.so.1"));
    let nvcomp = folder.path().join("libnvcomp.so.6");
    build("nvcomp.cpp", &nvcomp);
    let ran = Command::new(std::env::current_exe().unwrap())
        .args(arguments)
        .env("LD_LIBRARY_PATH", folder.path())
        .env("NVCOMP_LIBRARY", nvcomp)
        .env("S4_REQUIRE_GPU", "1")
        .env(INSIDE, "1")
        .output()
        .unwrap();
    let (out, err) = (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    assert!(ran.status.success(), "{out}\n{err}");
    assert!(!out.contains("skipped") && out.contains("... ok"), "{out}");
}
