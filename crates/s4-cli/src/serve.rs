//! `serve`: the service that trainers hand checkpoints to.

use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use s4_runner::{Config, Hooks, Unconverted};
use s4weights::WriteOptions;

use crate::convert;
use crate::error::{Failure, Result};
use crate::progress::Bar;

/// What the file says, flags and environment replace.
#[derive(Args)]
pub(crate) struct Serve {
    /// Configuration file in TOML (docs/runner.md lists its keys)
    #[arg(long, env = "S4W_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
    /// Folder or URL of the store to save checkpoints to
    #[arg(long, env = "S4W_STORE", value_name = "URL")]
    store: Option<String>,
    /// Folder of the journal
    #[arg(long, env = "S4W_STATE_DIR", value_name = "FOLDER")]
    state_dir: Option<PathBuf>,
    /// Folder to keep checkpoints in until they are durable
    #[arg(long, env = "S4W_STAGING_DIR", value_name = "FOLDER")]
    staging_dir: Option<PathBuf>,
    /// Unix socket for submitting checkpoints
    #[arg(long, env = "S4W_SOCKET", value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Address of the read-only status page and metrics
    #[arg(long, env = "S4W_HTTP", value_name = "ADDRESS")]
    http: Option<String>,
    /// Maximum duration of a shutdown, in seconds
    #[arg(long, env = "S4W_DRAIN_SECONDS", value_name = "SECONDS")]
    drain_seconds: Option<u64>,
    /// Refuse to start without a CUDA device
    #[arg(long)]
    require_gpu: bool,
    /// Poll the instance metadata service for spot interruptions
    #[arg(long)]
    spot: bool,
}

impl Serve {
    fn config(self) -> Result<Config> {
        let mut config = match &self.config {
            Some(path) => Config::read(path)?,
            None => Config::default(),
        };
        let Self { store, state_dir, staging_dir, socket, http, drain_seconds, .. } = self;
        config.store = store.unwrap_or(config.store);
        config.state_dir = state_dir.unwrap_or(config.state_dir);
        config.staging_dir = staging_dir.or(config.staging_dir);
        config.socket = socket.unwrap_or(config.socket);
        config.http = http.unwrap_or(config.http);
        config.drain_seconds = drain_seconds.unwrap_or(config.drain_seconds);
        config.require_gpu |= self.require_gpu;
        config.spot |= self.spot;
        Ok(config)
    }
}

/// `serve`
pub(crate) fn serve(args: Serve) -> Result<()> {
    let config = args.config()?;
    let preset = config.preset()?;
    let threads = config.threads;
    let hooks = Hooks {
        convert: Arc::new(move |from, to| {
            let options = WriteOptions { preset, threads, ..WriteOptions::default() };
            let (from, to) = (from.to_string_lossy(), to.to_string_lossy());
            let done = convert::compress(&from, (&to, true), options, &Bar::new(true));
            done.map(drop).map_err(|e: Failure| unconverted(&e))
        }),
        ..Hooks::default()
    };
    Ok(s4_runner::run(config, hooks)?)
}

/// Whether a file that could not be converted is tried again.
fn unconverted(failure: &Failure) -> Unconverted {
    let why = failure.to_string();
    match failure {
        // Other programs may need less of it later, but a file may be too large for the machine.
        Failure::NoMemory(_) => Unconverted::Killed(why),
        // Not readable or writable now: a full drive, say.
        _ if failure.exit_code() == 3 => Unconverted::Later(why),
        _ => Unconverted::Rejected(why),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_may_succeed_later_is_tried_again() {
        let none = crate::arrays::buffer(usize::MAX / 2, "w").unwrap_err();
        assert_eq!(none.exit_code(), 6);
        assert!(
            matches!(unconverted(&none), Unconverted::Killed(why) if why.contains("no memory"))
        );
        let full = Failure::Io(std::io::ErrorKind::StorageFull.into());
        assert!(matches!(unconverted(&full), Unconverted::Later(_)));
        let other = Failure::Unsupported("another format".into());
        assert!(matches!(unconverted(&other), Unconverted::Rejected(_)));
    }
}
