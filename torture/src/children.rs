//! Starting, killing and pausing processes.

use std::fs::{File, OpenOptions};
use std::io;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::Outcome;
use crate::roles::Args;

/// A process under attack. Dropped, it is killed.
pub(crate) struct Process {
    child: Child,
    paused: bool,
}

impl Process {
    /// Starts this program again, in a role. Its output is kept with the journals.
    pub(crate) fn start(role: &str, args: &Args) -> Outcome<Self> {
        let said = args.folder.join("said.txt");
        let said: File = OpenOptions::new().create(true).append(true).open(said)?;
        let mut command = Command::new(std::env::current_exe()?);
        command.arg(role).args(args.target.arguments());
        command.args(["--seed", &args.seed.to_string(), "--number", &args.number.to_string()]);
        command.arg("--folder").arg(&args.folder).args(["--seconds", &args.seconds.to_string()]);
        command.stdin(Stdio::null()).stdout(said.try_clone()?).stderr(said);
        Ok(Self { child: command.spawn()?, paused: false })
    }

    /// Whether it has ended on its own.
    pub(crate) fn has_ended(&mut self) -> bool {
        self.child.try_wait().ok().flatten().is_some()
    }

    /// Waits until it ends, for at most `most`. Returns whether it did.
    pub(crate) fn wait(&mut self, most: Duration) -> bool {
        let end = Instant::now() + most;
        while !self.has_ended() {
            if Instant::now() > end {
                return false;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        true
    }

    /// Kills it, with no chance to tidy up.
    pub(crate) fn kill(&mut self) -> io::Result<()> {
        self.paused = false;
        self.child.kill()?;
        self.child.wait().map(drop)
    }

    /// Pauses it.
    pub(crate) fn pause(&mut self) -> io::Result<()> {
        self.paused = true;
        self.signal("-STOP")
    }

    /// Resumes it, if it is paused.
    pub(crate) fn go_on(&mut self) -> io::Result<()> {
        match std::mem::take(&mut self.paused) {
            true => self.signal("-CONT"),
            false => Ok(()),
        }
    }

    fn signal(&self, signal: &str) -> io::Result<()> {
        Command::new("kill").args([signal, &self.child.id().to_string()]).status().map(drop)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended on its own.
        let _ = self.kill();
    }
}
