//! `cargo xtask torture`.

use std::path::Path;

use crate::error::Result;
use crate::proc;
use crate::servers::{Kind, Servers};

/// Which attacks to run, and for how long.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Run only this attack
    #[arg(value_enum)]
    attack: Option<Attack>,
    /// Number of kills (default: 500), operations (5000), creations (500), tries of each liar (11)
    #[arg(long)]
    rounds: Option<usize>,
    /// Seed of random choices; by default a new one each time
    #[arg(long)]
    seed: Option<u64>,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Attack {
    Kills,
    Proxy,
    Creation,
    Liars,
    Vanish,
}

impl Attack {
    fn name(self) -> &'static str {
        match self {
            Self::Kills => "kills",
            Self::Proxy => "proxy",
            Self::Creation => "creation",
            Self::Liars => "liars",
            Self::Vanish => "vanish",
        }
    }
}

/// Runs the attacks on folders and on real servers.
///
/// # Errors
/// If a server does not start, or the store breaks a promise.
pub(crate) fn run(root: &Path, args: &Args) -> Result<String> {
    let wanted: &[Kind] = match args.attack {
        None => &[Kind::S3, Kind::Azure, Kind::Racing],
        Some(Attack::Liars) => &[Kind::S3, Kind::Racing],
        Some(_) => &[Kind::S3, Kind::Azure],
    };
    let servers = Servers::start(root, wanted)?;
    let mut attack = proc::cargo(root);
    attack.envs(servers.environment());
    // Built with the profile of the tests, since it is one of them.
    attack.args(["run", "--locked", "--profile", "test", "--package", "s4-torture", "--"]);
    attack.arg(args.attack.map_or("all", Attack::name));
    attack.args(args.rounds.iter().flat_map(|n| ["--rounds".to_owned(), n.to_string()]));
    attack.args(args.seed.iter().flat_map(|n| ["--seed".to_owned(), n.to_string()]));
    proc::run(&mut attack)?;
    Ok("no acknowledged save was lost, no value was wrong".into())
}
