//! The program `s4w`.

use std::process::ExitCode;

fn main() -> ExitCode {
    ExitCode::from(s4_cli::run_program(std::env::args_os()))
}
