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
    // A row of the demo's table; the demo says so where it is missing.
    venv.install_peers("zipnn")?;
    // Stopped when this function ends.
    let servers = Servers::start(root, &[Kind::S3])?;
    let mut demo = proc::command(root, venv.python());
    // ZipNN still uses a part of torch that warns of its end.
    demo.args(["-W", "ignore::FutureWarning", "examples/demo.py", "--folder", ".demo"]);
    demo.args(["--s3", &servers.s3_url(), "--bucket", BUCKET]);
    demo.arg("--program").arg(test::program(root)?);
    proc::run(&mut demo)?;
    Ok("killed and resumed runs, with files, in a folder, over S3 and through a runner, ended in the unbroken run's \
        state, bit for bit"
        .into())
}
