//! `cargo xtask kernels`: builds, from the kernels' sources, the files that the GPU engine loads: PTX, which every
//! driver translates for its device, and machine code for today's devices, which needs no translation.
//!
//! PTX comes from an old compiler on purpose: every driver from 525 on reads what it makes. Machine
//! code is read by every driver of the same major version of CUDA, and a newer assembler makes
//! faster code.

use std::fs;
use std::path::Path;

use crate::error::{Error, Result};
use crate::proc;
use crate::python::Venv;

/// The packages of the compiler and the assembler, and the folder of their environment below the
/// target folder.
const COMPILERS: [&str; 2] = ["nvidia-cuda-nvrtc-cu12==12.0.140", "nvidia-cuda-nvcc-cu12==12.9.86"];
const FOLDER: &str = "kernels-compilers";

/// Prints where the assembler is.
const ASSEMBLER: &str = "import importlib.util as u; \
    print(next(iter(u.find_spec('nvidia.cuda_nvcc').submodule_search_locations)) + '/bin/ptxas')";

const SOURCES: &str = "crates/s4-codec-gpu/kernels";
const PTX: &str = "s4.ptx";

/// The architectures that machine code is made for: it runs on devices of the same generation that
/// are no older.
const ARCHITECTURES: [&str; 3] = ["sm_80", "sm_89", "sm_90"];

/// What to do with the files.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Only compare with the files in the tree
    #[arg(long)]
    check: bool,
}

/// Checks the files, if there is a compiler for this system.
///
/// # Errors
/// As [`run`].
pub(crate) fn check(root: &Path) -> Result<String> {
    if cfg!(not(target_os = "linux")) {
        return Ok("kernels not checked: their compiler needs Linux".into());
    }
    run(root, &Args { check: true })
}

/// Makes the files, or checks that they are what their sources make.
///
/// # Errors
/// If the compiler cannot be installed or refuses the sources; with `--check`, if a file differs.
pub(crate) fn run(root: &Path, args: &Args) -> Result<String> {
    let folder = proc::target_folder(root)?.join(FOLDER);
    let venv = Venv::with_packages(root, &folder, &COMPILERS)?;
    let ptx = folder.join(PTX);
    let mut compile = proc::command(root, venv.python());
    proc::run(compile.args(["xtask/src/kernels/nvrtc.py", SOURCES]).arg(&ptx))?;
    let mut find = proc::command(root, venv.python());
    let assembler = proc::output(find.args(["-c", ASSEMBLER]))?;
    let mut made = vec![PTX.to_owned()];
    for architecture in ARCHITECTURES {
        let name = format!("s4.{architecture}.cubin");
        let mut assemble = proc::command(root, assembler.trim());
        assemble.arg(format!("-arch={architecture}")).arg(&ptx).arg("-o").arg(folder.join(&name));
        proc::run(&mut assemble)?;
        made.push(name);
    }
    let read = |path: &Path| fs::read(path).map_err(|e| Error::at(path, &e));
    let mut size = 0;
    for name in made {
        let (made, kept) = (read(&folder.join(&name))?, root.join(SOURCES).join(&name));
        size += made.len();
        if !args.check {
            fs::write(&kept, made).map_err(|e| Error::at(&kept, &e))?;
        } else if read(&kept)? != made {
            let kept = kept.display();
            let what = format!("{kept} does not match its sources: run `cargo xtask kernels`");
            return Err(Error::new(what));
        }
    }
    let size = format!("{} KB of kernels", size / 1024);
    Ok(if args.check { format!("{size}, up to date with their sources") } else { size })
}
