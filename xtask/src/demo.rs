//! `cargo xtask demo`.

use std::path::Path;

use crate::error::Result;
use crate::proc;
use crate::python::Venv;
use crate::servers::{BUCKET, Kind, Servers};
use crate::test;

/// Prepares the environment and runs `examples/demo.py` in it.
///
/// # Errors
/// If a build fails, or the demo finds a difference.
pub(crate) fn run(root: &Path) -> Result<String> {
    let venv = Venv::main(root)?;
    venv.install_wheel()?;
    // ZipNN is a row of the demo's table; without it, the demo says so.
    venv.install_peers("zipnn")?;
    // The servers stop when this function ends.
    let servers = Servers::start(root, &[Kind::S3])?;
    let mut demo = proc::command(root, venv.python());
    // ZipNN still uses a deprecated part of torch.
    demo.args(["-W", "ignore::FutureWarning", "examples/demo.py", "--folder", ".demo"]);
    demo.args(["--s3", &servers.s3_url(), "--bucket", BUCKET]);
    demo.arg("--program").arg(test::program(root)?);
    proc::run(&mut demo)?;
    Ok("killed and resumed runs, with files, in a folder, over S3 and through a runner, ended in the unbroken run's \
        state, bit for bit"
        .into())
}
