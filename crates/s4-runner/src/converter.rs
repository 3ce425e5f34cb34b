//! Runs the program that turns PyTorch's files into a `.s4w` file: the `s4w` of the Python wheel.

use std::io::{self, Read};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::watch::Unconverted;

/// How long a conversion may take.
const LONGEST: Duration = Duration::from_secs(3600);
/// How many characters of the program's error output are passed on: the last ones.
const SAID: usize = 500;
/// The program's exit code if something could not be read or written, such as on a full drive.
const IO: i32 = 3;

/// Converts a file or folder. `ends` tells whether the service is ending.
///
/// # Errors
/// [`Unconverted`], with the end of the program's error output.
pub(crate) fn run(
    program: &Path,
    from: &Path,
    to: &Path,
    ends: &dyn Fn() -> bool,
) -> Result<(), Unconverted> {
    let later = |e: io::Error| Unconverted::Later(format!("{}: {e}", program.display()));
    let mut command = Command::new(program);
    command.arg("compress").arg(from).arg(to).stdin(Stdio::null()).stdout(Stdio::null());
    let mut child = command.stderr(Stdio::piped()).spawn().map_err(later)?;
    let said = listen(&mut child);
    let status = wait(&mut child, ends).map_err(later)?;
    let said = said.map(|thread| thread.join().unwrap_or_default()).unwrap_or_default();
    let why = |status: ExitStatus| format!("{} ended with {status}: {said}", program.display());
    match status {
        Some(status) if status.success() => Ok(()),
        // Killed (perhaps for its memory), or a failed read or write.
        Some(status) if status.code().is_none_or(|code| code == IO) => {
            Err(Unconverted::Later(why(status)))
        }
        Some(status) => Err(Unconverted::Rejected(why(status))),
        None if ends() => Err(Unconverted::Later("the runner is shutting down".into())),
        None => Err(Unconverted::Rejected("converting it took too long".into())),
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
    use std::os::unix::fs::PermissionsExt;

    fn outcome(script: &str) -> Result<(), Unconverted> {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("convert");
        std::fs::write(&program, format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).unwrap();
        run(&program, Path::new("a b"), Path::new("c"), &|| false)
    }

    #[test]
    fn outcomes_are_told_apart() {
        outcome("[ \"$1|$2|$3\" = 'compress|a b|c' ]").unwrap();
        let bad = outcome("echo no checkpoint >&2; exit 1").unwrap_err();
        assert!(
            matches!(&bad, Unconverted::Rejected(why) if why.ends_with("1: no checkpoint")),
            "{bad}"
        );
        for passes in ["echo the drive is full >&2; exit 3", "kill -9 $$"] {
            let later = outcome(passes).unwrap_err();
            assert!(matches!(later, Unconverted::Later(_)), "{later}");
        }
        let missing = run(Path::new("/no/such/program"), Path::new("a"), Path::new("b"), &|| false);
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
        std::fs::write(&program, "#!/bin/sh\nexec sleep 100\n").unwrap();
        std::fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).unwrap();
        let ended = run(&program, Path::new("a"), Path::new("b"), &|| true);
        assert!(matches!(ended, Err(Unconverted::Later(_))));
    }
}
