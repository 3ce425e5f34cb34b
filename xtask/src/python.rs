//! The project's Python environments: `.venv` for the tests and the demo, `.venv-peers` for the
//! peers that the benchmark measures, `.venv-servers` for servers that the store is tested against, `.venv-deploy` and
//! `.venv-checkov` for what checks the files in `deploy`, `.venv-adapters` for the frameworks of adapters.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::error::{Error, Result};
use crate::proc;

/// The interpreters to try, in this order, after the one that `$PYTHON` names.
const CANDIDATES: [&str; 7] =
    ["python3", "python", "python3.14", "python3.13", "python3.12", "python3.11", "python3.10"];

/// The pip that installs everything else: older ones, such as come with Python, give up a download of hundreds
/// of megabytes when the connection breaks.
const PIP: &str = "pip==26.1.2";

/// How often an installation that downloads what everything needs is tried, and how long each may take.
const TRIES: u32 = 3;
const LIMIT: Duration = Duration::from_secs(1200);

/// Succeeds on an interpreter that this project supports.
const PROBE: &str = "import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))";

/// Frameworks that take long to install, for the tests of their adapters.
const ADAPTERS: &str = "xtask/requirements-adapters.txt";

/// A virtual environment inside the project.
pub(crate) struct Venv {
    root: PathBuf,
    folder: PathBuf,
}

impl Venv {
    /// The environment of the tests and the demo, with what `xtask/requirements.txt` names.
    ///
    /// # Errors
    /// If no suitable Python is found, or an installation fails.
    pub(crate) fn main(root: &Path) -> Result<Self> {
        let venv = Self::at(root, ".venv")?;
        venv.require("xtask/requirements.txt")?;
        Ok(venv)
    }

    /// The environment of the servers that the store is tested against.
    ///
    /// # Errors
    /// If no suitable Python is found, or an installation fails.
    pub(crate) fn servers(root: &Path) -> Result<Self> {
        let venv = Self::at(root, ".venv-servers")?;
        venv.require("xtask/requirements-servers.txt")?;
        Ok(venv)
    }

    /// The environment of the tools that check the files in `deploy`.
    ///
    /// # Errors
    /// If no suitable Python is found, or an installation fails.
    pub(crate) fn deploy(root: &Path) -> Result<Self> {
        let venv = Self::at(root, ".venv-deploy")?;
        venv.require("xtask/requirements-deploy.txt")?;
        Ok(venv)
    }

    /// The environment of checkov, which needs old versions of many packages.
    ///
    /// # Errors
    /// If no suitable Python is found, or an installation fails.
    pub(crate) fn checkov(root: &Path) -> Result<Self> {
        let venv = Self::at(root, ".venv-checkov")?;
        venv.require("xtask/requirements-checkov.txt")?;
        Ok(venv)
    }

    /// The environment of the benchmark's peers. It sees what `main` holds (torch, 5 GB, is
    /// installed once), so that all are measured in one process.
    ///
    /// Returns the environment and the peers that could not be installed here.
    ///
    /// # Errors
    /// If the environment itself cannot be made.
    pub(crate) fn peers(root: &Path, main: &Self) -> Result<(Self, Vec<String>)> {
        let venv = Self::over(root, ".venv-peers", main)?;
        let missing = venv.install_peers("")?;
        Ok((venv, missing))
    }

    /// The environment of the tests of adapters for frameworks that take long to install, on top of
    /// what `main` holds.
    ///
    /// Returns the environment and the frameworks that could not be installed here.
    ///
    /// # Errors
    /// If the environment itself cannot be made.
    pub(crate) fn adapters(root: &Path, main: &Self) -> Result<(Self, Vec<String>)> {
        let venv = Self::over(root, ".venv-adapters", main)?;
        let wanted = read(&root.join(ADAPTERS))?;
        let stamp = venv.folder.join("installed-requirements.txt");
        if fs::read_to_string(&stamp).is_ok_and(|installed| installed == wanted) {
            return Ok((venv, vec![]));
        }
        let missing = venv.install_each(ADAPTERS, "")?;
        if missing.is_empty() {
            fs::write(&stamp, wanted).map_err(|e| Error::at(&stamp, &e))?;
        }
        Ok((venv, missing))
    }

    /// An environment that sees what another one holds.
    fn over(root: &Path, name: &str, below: &Self) -> Result<Self> {
        let venv = Self::at(root, name)?;
        let link = venv.site_packages()?.join("main-environment.pth");
        let text = format!("{}\n", below.site_packages()?.display());
        fs::write(&link, text).map_err(|e| Error::at(&link, &e))?;
        Ok(venv)
    }

    /// An environment at `folder`, which may be anywhere, with just these packages.
    ///
    /// # Errors
    /// If no suitable Python is found, or an installation fails.
    pub(crate) fn with_packages(root: &Path, folder: &Path, packages: &[&str]) -> Result<Self> {
        let venv = Self::at(root, &folder.to_string_lossy())?;
        let wanted = packages.join("\n");
        let stamp = venv.folder.join("installed-packages.txt");
        if fs::read_to_string(&stamp).is_ok_and(|installed| installed == wanted) {
            return Ok(venv);
        }
        venv.pip(&[&["--no-deps"], packages].concat(), TRIES)?;
        fs::write(&stamp, wanted).map_err(|e| Error::at(&stamp, &e))?;
        Ok(venv)
    }

    /// Installs the peers whose name starts with `prefix`, one by one, so that a peer that cannot
    /// be installed here does not keep the others out. Returns those that could not be installed.
    ///
    /// # Errors
    /// If the list of peers cannot be read.
    pub(crate) fn install_peers(&self, prefix: &str) -> Result<Vec<String>> {
        self.install_each("xtask/requirements-peers.txt", prefix)
    }

    /// Installs the lines of a file that start with `prefix`, one by one. A line may have options.
    fn install_each(&self, file: &str, prefix: &str) -> Result<Vec<String>> {
        let list = read(&self.root.join(file))?;
        let named = list.lines().filter(|l| !l.starts_with('#') && l.starts_with(prefix));
        let install = |line: &&str| self.pip(&line.split_whitespace().collect::<Vec<_>>(), 1);
        Ok(named.filter(|line| install(line).is_err()).map(str::to_owned).collect())
    }

    /// The environment's folder.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Installs packages by name.
    ///
    /// # Errors
    /// If the installation fails.
    pub(crate) fn install(&self, packages: &[&str]) -> Result<()> {
        self.pip(packages, TRIES)
    }

    /// The environment's interpreter.
    pub(crate) fn python(&self) -> PathBuf {
        self.program("python")
    }

    /// A program that the environment holds.
    pub(crate) fn program(&self, name: &str) -> PathBuf {
        self.folder.join(if cfg!(windows) { "Scripts" } else { "bin" }).join(name)
    }

    /// Builds the wheel that users get, and installs it here.
    ///
    /// # Errors
    /// If the build or the installation fails.
    pub(crate) fn install_wheel(&self) -> Result<()> {
        self.install_wheel_of("release")
    }

    /// Builds the wheel in the way the Rust tests are built, with assertions and overflow checks
    /// and in a fraction of the time, and installs it here.
    ///
    /// # Errors
    /// If the build or the installation fails.
    pub(crate) fn install_checked_wheel(&self) -> Result<()> {
        self.install_wheel_of("dev")
    }

    fn install_wheel_of(&self, profile: &str) -> Result<()> {
        let wheels = self.folder.join("wheels");
        if wheels.exists() {
            fs::remove_dir_all(&wheels).map_err(|e| Error::at(&wheels, &e))?;
        }
        let mut build = proc::command(&self.root, self.program("maturin"));
        build.args(["build", "--locked", "--profile", profile]);
        build.args(["--manifest-path", "crates/s4-py/Cargo.toml"]);
        build.arg("--interpreter").arg(self.python()).arg("--out").arg(&wheels);
        // The wheel is stripped, so debug information need not be written.
        build.env("CARGO_PROFILE_RELEASE_DEBUG", "0");
        proc::run(&mut build)?;
        let wheel = only_wheel(&wheels)?;
        self.pip(&["--force-reinstall", "--no-deps", &wheel.to_string_lossy()], 1)
    }

    fn at(root: &Path, name: &str) -> Result<Self> {
        let venv = Self { root: root.to_path_buf(), folder: root.join(name) };
        // `pyvenv.cfg` is written first and pip last: unless both are there, creation was cut
        // short.
        if !(venv.python().exists() && venv.program("pip").exists()) {
            let mut make = proc::command(root, find(root)?);
            make.args(["-m", "venv", "--clear", name]);
            proc::run(&mut make)?;
            venv.pip(&[PIP], TRIES)?;
        }
        Ok(venv)
    }

    /// Installs a requirements file, unless this same one was the last one installed here.
    fn require(&self, file: &str) -> Result<()> {
        let wanted = read(&self.root.join(file))?;
        let stamp = self.folder.join("installed-requirements.txt");
        if fs::read_to_string(&stamp).is_ok_and(|installed| installed == wanted) {
            return Ok(());
        }
        self.pip(&["--requirement", file], TRIES)?;
        fs::write(&stamp, wanted).map_err(|e| Error::at(&stamp, &e))
    }

    fn pip(&self, args: &[&str], tries: u32) -> Result<()> {
        let mut pip = proc::command(&self.root, self.python());
        pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]);
        // Leaves nothing outside the project's own folders.
        pip.arg("--no-cache-dir").args(args);
        // Keeps DeepSpeed from compiling for hours.
        pip.env("DS_BUILD_OPS", "0");
        // A break of the network is not a failed test.
        pip.args(["--retries", "10"]);
        proc::run_within(&mut pip, LIMIT, tries)
    }

    fn site_packages(&self) -> Result<PathBuf> {
        let mut ask = proc::command(&self.root, self.python());
        ask.args(["-c", "import sysconfig; print(sysconfig.get_paths()['platlib'])"]);
        Ok(PathBuf::from(proc::output(&mut ask)?.trim()))
    }
}

/// An interpreter that this project supports.
///
/// # Errors
/// If there is none.
pub(crate) fn find(root: &Path) -> Result<String> {
    let named = std::env::var("PYTHON").ok();
    let fits = |python: &String| {
        proc::output(proc::command(root, python.as_str()).args(["-c", PROBE])).is_ok()
    };
    named.into_iter().chain(CANDIDATES.map(String::from)).find(fits).ok_or_else(|| {
        Error::new("no Python 3.10 or later with venv and pip found (set PYTHON to an interpreter)")
    })
}

fn only_wheel(folder: &Path) -> Result<PathBuf> {
    let entries = fs::read_dir(folder).map_err(|e| Error::at(folder, &e))?;
    let mut wheels = entries
        .filter_map(|entry| entry.ok().map(|e| e.path()))
        .filter(|path| path.extension().is_some_and(|e| e == "whl"));
    match (wheels.next(), wheels.next()) {
        (Some(wheel), None) => Ok(wheel),
        _ => Err(Error::new(format!("{}: expected one wheel", folder.display()))),
    }
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).map_err(|e| Error::at(path, &e))
}
