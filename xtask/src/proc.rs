//! Starting other programs.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};

/// A command that runs in the workspace's root.
pub(crate) fn command(root: &Path, program: impl Into<OsString>) -> Command {
    let mut command = Command::new(program.into());
    command.current_dir(root);
    command
}

/// The cargo that started this program.
pub(crate) fn cargo(root: &Path) -> Command {
    command(root, std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
}

/// Where cargo builds, wherever the user has put it.
///
/// # Errors
/// If `cargo metadata` fails or names no folder.
pub(crate) fn target_folder(root: &Path) -> Result<PathBuf> {
    let mut ask = cargo(root);
    ask.args(["metadata", "--format-version", "1", "--no-deps"]);
    let answer: serde_json::Value = serde_json::from_str(&output(&mut ask)?)
        .map_err(|e| Error::new(format!("cargo metadata: {e}")))?;
    let folder = answer["target_directory"].as_str();
    folder.map(PathBuf::from).ok_or_else(|| Error::new("cargo metadata names no target directory"))
}

/// Prints a line that says what runs, then runs the command, with its output going where ours goes.
///
/// # Errors
/// If it does not start, or ends with a code other than 0.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    announce(command);
    let status = command.status().map_err(|e| not_started(command, &e))?;
    if status.success() {
        return Ok(());
    }
    Err(Error::new(format!("`{}` ended with {status}", line(command))))
}

/// Lines of a program's standard error that [`run_within`] repeats.
const LAST_LINES: usize = 4;

/// Runs the command as [`run`] does, up to `tries` times until it succeeds. Each try that takes longer than `limit`
/// is killed: for programs that wait for a network, sometimes forever.
///
/// # Errors
/// As [`run`], of the last try, with the last lines that it wrote to standard error; or that it took too long.
pub(crate) fn run_within(command: &mut Command, limit: Duration, tries: u32) -> Result<()> {
    let mut last = Error::new(format!("`{}` was not tried", line(command)));
    for _ in 0..tries {
        announce(command);
        command.stderr(Stdio::piped());
        let mut child = command.spawn().map_err(|e| not_started(command, &e))?;
        let errors = child.stderr.take().map(|it| std::thread::spawn(|| pass_on(it)));
        let end = Instant::now() + limit;
        let status = loop {
            match child.try_wait().map_err(|e| not_started(command, &e))? {
                Some(status) => break Some(status),
                None if Instant::now() < end => std::thread::sleep(Duration::from_millis(100)),
                None => break None,
            }
        };
        last = match status {
            Some(status) if status.success() => return Ok(()),
            Some(status) => {
                let said = errors.and_then(|it| it.join().ok()).unwrap_or_default();
                let said = said.iter().map(|said| format!("\n  {said}")).collect::<String>();
                Error::new(format!("`{}` ended with {status}{said}", line(command)))
            }
            None => {
                // It may have ended just now. Programs that it started may still write.
                let _ = child.kill();
                let _ = child.wait();
                Error::new(format!("`{}` took over {} s", line(command), limit.as_secs_f64()))
            }
        };
    }
    Err(last)
}

/// Copies lines to standard error, and returns the last ones.
fn pass_on(from: impl Read) -> VecDeque<String> {
    let mut last = VecDeque::new();
    for bytes in BufReader::new(from).split(b'\n').map_while(|line| line.ok()) {
        let text = String::from_utf8_lossy(&bytes).into_owned();
        eprintln!("{text}");
        last.push_back(text);
        if last.len() > LAST_LINES {
            last.pop_front();
        }
    }
    last
}

/// Runs the command as [`run`] does, and hands each line of its standard output to `see` as well.
///
/// # Errors
/// As [`run`].
pub(crate) fn run_seeing(command: &mut Command, mut see: impl FnMut(&str)) -> Result<()> {
    announce(command);
    let mut child = command.stdout(Stdio::piped()).spawn().map_err(|e| not_started(command, &e))?;
    if let Some(output) = child.stdout.take() {
        // A test may print bytes that are not UTF-8, so lines are split before they are decoded.
        for bytes in BufReader::new(output).split(b'\n') {
            let bytes = bytes.map_err(|e| Error::new(format!("cannot read its output: {e}")))?;
            let text = String::from_utf8_lossy(&bytes);
            println!("{text}");
            see(&text);
        }
    }
    let status = child.wait().map_err(|e| not_started(command, &e))?;
    if status.success() {
        return Ok(());
    }
    Err(Error::new(format!("`{}` ended with {status}", line(command))))
}

/// Runs the command silently and returns what it printed.
///
/// # Errors
/// As [`run`]; the error carries what it wrote to standard error.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let output = command.output().map_err(|e| not_started(command, &e))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(Error::new(format!("`{}` ended with {}: {}", line(command), output.status, said.trim())))
}

fn announce(command: &Command) {
    println!("\n$ {}", line(command));
}

fn not_started(command: &Command, error: &std::io::Error) -> Error {
    Error::new(format!("`{}` did not start: {error}", line(command)))
}

/// The command as a person would type it, the program without its folders.
fn line(command: &Command) -> String {
    let program = Path::new(command.get_program());
    let name = program.file_name().unwrap_or(command.get_program());
    let mut words = vec![name.to_string_lossy().into_owned()];
    words.extend(command.get_args().map(|a| a.to_string_lossy().into_owned()));
    words.join(" ")
}

#[cfg(all(test, unix))]
mod tests {
    use std::process::Command;
    use std::time::{Duration, Instant};

    use super::run_within;

    #[test]
    fn what_hangs_is_ended_and_tried_again() {
        let start = Instant::now();
        let mut hangs = Command::new("sleep");
        let limit = Duration::from_millis(200);
        let done = run_within(hangs.arg("600"), limit, 2);
        assert!(done.is_err_and(|e| e.to_string().contains("took over 0.2 s")));
        assert!(start.elapsed() >= 2 * limit && start.elapsed() < Duration::from_secs(60));
        let folder = std::env::temp_dir().join(format!("s4weights-tries-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        // Fails the first time, and succeeds the second.
        let script = r#"test -d "$0" || { mkdir "$0"; echo no room >&2; exit 3; }"#;
        let again = |tries| {
            run_within(Command::new("sh").args(["-c", script]).arg(&folder), limit * 100, tries)
        };
        assert!(again(1).is_err_and(|e| e.to_string().contains("exit status: 3\n  no room")));
        assert!(again(2).is_ok());
        let _ = std::fs::remove_dir_all(&folder);
    }
}
