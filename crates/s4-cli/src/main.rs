//! The program `s4w`.

use std::process::ExitCode;

fn main() -> ExitCode {
    s4_cli::run(std::env::args_os())
}
