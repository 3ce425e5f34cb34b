//! Runs the program that turns PyTorch's files into a `.s4w` file: the `s4w` of the Python wheel.

use std::fs;
use std::io::{self, Read};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a conversion may take.
const LONGEST: Duration = Duration::from_secs(3600);
/// How many characters of the program's error output are passed on: the last ones.
const SAID: usize = 500;
/// Added, in thousandths of the machine's memory, to the program's share of memory when the kernel chooses a
/// process to kill: the program should be killed rather than the training, or the service, whose adjustment it
/// would inherit.
const OOM_SCORE: i32 = 500;
/// The program's exit code if something could not be read or written, such as on a full drive.
const IO: i32 = 3;
/// Its exit code if there was no memory.
const NO_MEMORY: i32 = 6;

/// Why something in the watched folder was not converted.
#[derive(Debug, thiserror::Error)]
pub enum Unconverted {
    /// It may succeed later: the drive is full, say.
    #[error("{0}")]
    Later(String),
    /// There was no memory for it, or the program that converts it was killed, perhaps for its memory: it is tried
    /// again a few times.
    #[error("{0}")]
    Killed(String),
    /// It cannot be converted as it is, and is ignored until it changes.
    #[error("{0}")]
    Rejected(String),
}

/// Converts a file or folder with a program, using this many threads. `ends` tells whether the service is ending.
///
/// # Errors
/// [`Unconverted`], with the end of the program's error output.
pub(crate) fn run(
    (program, threads): (&Path, Option<usize>),
    from: &Path,
    to: &Path,
    ends: &dyn Fn() -> bool,
) -> Result<(), Unconverted> {
    let later = |e: io::Error| Unconverted::Later(format!("{}: {e}", program.display()));
    let mut command = Command::new(program);
    command.arg("compress").arg(from).arg(to).stdin(Stdio::null()).stdout(Stdio::null());
    if let Some(threads) = threads {
        command.arg("--threads").arg(threads.to_string());
    }
    let mut child = command.stderr(Stdio::piped()).spawn().map_err(later)?;
    goes_first(child.id());
    let said = listen(&mut child);
    let status = wait(&mut child, ends).map_err(later)?;
    let said = said.map(|thread| thread.join().unwrap_or_default()).unwrap_or_default();
    let why = |status: ExitStatus| format!("{} failed with {status}: {said}", program.display());
    match status {
        Some(status) if status.success() => Ok(()),
        Some(status) if status.code().is_none() => Err(Unconverted::Killed(why(status))),
        // Other programs may need less of it later, but a file may be too large for the machine.
        Some(status) if status.code() == Some(NO_MEMORY) => Err(Unconverted::Killed(why(status))),
        Some(status) if status.code() == Some(IO) => Err(Unconverted::Later(why(status))),
        Some(status) => Err(Unconverted::Rejected(why(status))),
        None if ends() => Err(Unconverted::Later("the runner is shutting down".into())),
        None => Err(Unconverted::Rejected("the conversion took too long".into())),
    }
}

/// Makes a process the first that the kernel kills when memory runs out, unless it already is.
fn goes_first(process: u32) {
    let file = format!("/proc/{process}/oom_score_adj");
    let now = fs::read_to_string(&file).ok().and_then(|text| text.trim().parse::<i32>().ok());
    if now.is_some_and(|now| now < OOM_SCORE) {
        // It may have ended already.
        let _ = fs::write(file, OOM_SCORE.to_string());
    }
}

/// Reads the program's error output to its end, so that the program never blocks on it.
fn listen(child: &mut Child) -> Option<JoinHandle<String>> {
    let mut pipe = child.stderr.take()?;
    Some(std::thread::spawn(move || {
        let (mut last, mut part) = (vec![], [0; 4096]);
        while let Ok(n @ 1..) = pipe.read(&mut part) {
            last.extend_from_slice(&part[..n]);
            last.drain(..last.len().saturating_sub(4 * SAID));
        }
        let text = String::from_utf8_lossy(&last);
        let words: Vec<_> = text.split(|c: char| c.is_whitespace() || c.is_control()).collect();
        let text = words.into_iter().filter(|w| !w.is_empty()).collect::<Vec<_>>().join(" ");
        let skipped = text.chars().count().saturating_sub(SAID);
        text.chars().skip(skipped).collect()
    }))
}

/// Waits for the program to end; `None`: it was killed, for time or because the service ends.
fn wait(child: &mut Child, ends: &dyn Fn() -> bool) -> io::Result<Option<ExitStatus>> {
    let end = Instant::now() + LONGEST;
    loop {
        match child.try_wait()? {
            Some(status) => return Ok(Some(status)),
            None if Instant::now() > end || ends() => {
                child.kill()?;
                child.wait()?;
                return Ok(None);
            }
            None => std::thread::sleep(Duration::from_millis(50)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes a program. A process of its own does it: while a test that runs beside starts a process, that process has
    /// a copy of each descriptor of this one, and nothing can be run that is open for writing ("text file busy").
    fn write_program(path: &Path, script: &str) {
        let write = "printf '#!/bin/sh\n%s\n' \"$1\" > \"$0\" && chmod 755 \"$0\"";
        let written = Command::new("sh").args(["-c", write]).arg(path).arg(script).status();
        assert!(written.unwrap().success());
    }

    fn outcome(script: &str) -> Result<(), Unconverted> {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("convert");
        write_program(&program, script);
        run((&program, Some(3)), Path::new("a b"), Path::new("c"), &|| false)
    }

    #[test]
    fn outcomes_are_told_apart() {
        outcome("[ \"$*\" = 'compress a b c --threads 3' ] && [ $# = 5 ]").unwrap();
        #[cfg(target_os = "linux")]
        outcome("until [ \"$(cat /proc/$$/oom_score_adj)\" -ge 500 ]; do sleep 0.1; done").unwrap();
        let bad = outcome("echo no checkpoint >&2; exit 1").unwrap_err();
        assert!(
            matches!(&bad, Unconverted::Rejected(why) if why.ends_with("1: no checkpoint")),
            "{bad}"
        );
        let later = outcome("echo the drive is full >&2; exit 3").unwrap_err();
        assert!(matches!(later, Unconverted::Later(_)), "{later}");
        for script in ["kill -9 $$", "echo no memory >&2; exit 6"] {
            let killed = outcome(script).unwrap_err();
            assert!(matches!(killed, Unconverted::Killed(_)), "{killed}");
        }
        let program = (Path::new("/no/such/program"), None);
        let missing = run(program, Path::new("a"), Path::new("b"), &|| false);
        assert!(matches!(missing, Err(Unconverted::Later(_))));
    }

    #[test]
    fn a_program_that_says_much_is_not_waited_for() {
        let bad = outcome("yes | head -c 1000000 >&2; printf 'the \\033[31mend\\n' >&2; exit 1");
        let bad = bad.unwrap_err().to_string();
        assert!(bad.ends_with("the [31mend") && bad.len() < 700, "{bad}");
    }

    #[test]
    fn it_ends_with_the_service() {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("convert");
        write_program(&program, "exec sleep 100");
        let ended = run((&program, None), Path::new("a"), Path::new("b"), &|| true);
        assert!(matches!(ended, Err(Unconverted::Later(_))));
    }
}
