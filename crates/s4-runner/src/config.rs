//! The service's configuration: a TOML file, whose values flags and environment variables override.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use s4weights::{Preset, StorageOptions, check_storage_options, check_url, redact_url};
use serde::Deserialize;

use crate::entitlement::{self, check_address};
use crate::error::{Error, Result};

/// The largest configuration file, in bytes.
const MAX_FILE: u64 = 1 << 20;

/// The configuration. Every member but `store` has a default.
#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Folder or URL of the store that checkpoints become durable in.
    pub store: String,
    /// Settings of that store's object store, such as `region`. They may be secrets, so they are never shown.
    pub storage_options: StorageOptions,
    /// Folder of the journal. It must survive restarts of the machine.
    pub state_dir: PathBuf,
    /// Where checkpoints wait until they are durable, best a local NVMe drive; `None`: a folder in
    /// `state_dir`.
    pub staging_dir: Option<PathBuf>,
    /// The socket that checkpoints are submitted through.
    pub socket: PathBuf,
    /// Address of the read-only page: health, metrics and status.
    pub http: String,
    /// `fast`, `balanced` or `small`.
    pub preset: String,
    /// Encoding threads; `None`: as many as the machine has cores.
    pub threads: Option<usize>,
    /// Limit on the bytes of staged and compressed checkpoints that are not durable yet; 0: no limit.
    pub quota_bytes: u64,
    /// Bytes of the staging drive to keep free.
    pub min_free_bytes: u64,
    /// How many durable checkpoints stay on the local drive, to restore from.
    pub keep_local: usize,
    /// How many checkpoints the store keeps, the newest ones; `None`: all.
    pub keep_last: Option<usize>,
    /// Limit on uploads, in bytes per second.
    pub bandwidth: Option<u64>,
    /// User ids that may use the socket, besides root and the user that the service runs as.
    pub allow_uids: Vec<u32>,
    /// Group ids whose members may use the socket, if it is their primary group.
    pub allow_gids: Vec<u32>,
    /// The longest that a shutdown may take, in seconds.
    pub drain_seconds: u64,
    /// Whether to poll the instance metadata for interruptions.
    pub spot: bool,
    /// Address of the instance metadata service.
    pub imds: String,
    /// Do not start without a CUDA device.
    pub require_gpu: bool,
    /// A folder whose checkpoints the service takes.
    pub watch: Option<Watch>,
    /// How to check whether this machine may run the service.
    pub entitlement: entitlement::Settings,
}

/// A folder where trainers drop checkpoints.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Watch {
    /// The folder.
    pub folder: PathBuf,
    /// Whether a checkpoint is removed once it is durable.
    #[serde(default)]
    pub remove: bool,
    /// Seconds that a checkpoint must be unchanged before it is taken.
    #[serde(default = "settle")]
    pub settle_seconds: u64,
    /// The program that turns `.pt` files and folders of `torch.distributed.checkpoint` into
    /// `.s4w`: the `s4w` of the Python wheel, which unpickles nothing but tensors and plain values.
    /// `None`: such files and folders are refused.
    #[serde(default)]
    pub pt_converter: Option<PathBuf>,
}

fn settle() -> u64 {
    10
}

impl Default for Config {
    fn default() -> Self {
        Self {
            store: String::new(),
            storage_options: StorageOptions::new(),
            state_dir: "/var/lib/s4weights".into(),
            staging_dir: None,
            socket: "/run/s4weights/s4w.sock".into(),
            http: "127.0.0.1:8080".into(),
            preset: "balanced".into(),
            threads: None,
            quota_bytes: 0,
            min_free_bytes: 1 << 30,
            keep_local: 2,
            keep_last: None,
            bandwidth: None,
            allow_uids: vec![],
            allow_gids: vec![],
            drain_seconds: 100,
            spot: false,
            imds: "http://169.254.169.254".into(),
            require_gpu: false,
            watch: None,
            entitlement: entitlement::Settings::default(),
        }
    }
}

impl Config {
    /// Reads a file.
    ///
    /// # Errors
    /// [`Error::Config`] if it cannot be read or parsed.
    pub fn read(path: &Path) -> Result<Self> {
        let bad = |why: String| Error::Config(format!("{}: {why}", path.display()));
        let len = std::fs::metadata(path).map_err(|e| bad(e.to_string()))?.len();
        if len > MAX_FILE {
            return Err(bad(format!("the file has {len} bytes, at most {MAX_FILE} are allowed")));
        }
        let text = std::fs::read_to_string(path).map_err(|e| bad(e.to_string()))?;
        // The parser's own message would repeat the line, which may hold a secret.
        toml::from_str(&text).map_err(|e| {
            let before = e.span().map_or("", |span| &text[..span.start]);
            let line = 1 + before.matches('\n').count();
            let key = key_before(before).map_or(String::new(), |key| format!(" `{key}`:"));
            bad(format!("line {line}:{key} {}", without_value(e.message())))
        })
    }

    /// Checks what can be checked without contacting a service.
    ///
    /// # Errors
    /// [`Error::Config`], naming the member.
    pub fn check(&self) -> Result<()> {
        let bad = |what: &str| Err(Error::Config(what.to_owned()));
        if self.store.is_empty() {
            return bad("`store` is missing: set it to the folder or URL to save checkpoints to");
        }
        check_url(&self.store).map_err(|e| Error::Config(format!("`store`: {e}")))?;
        if self.http.parse::<std::net::SocketAddr>().is_err() {
            return bad("`http`: expected an address such as 127.0.0.1:8080");
        }
        if !(1..=3600).contains(&self.drain_seconds) {
            return bad("`drain_seconds`: expected 1 to 3600");
        }
        if self.bandwidth == Some(0) {
            return bad("`bandwidth` is 0: no checkpoint would ever become durable");
        }
        if self.keep_last == Some(0) {
            return bad("`keep_last` is 0: no checkpoint would be kept");
        }
        check_storage_options(&self.storage_options)
            .map_err(|e| Error::Config(format!("`storage_options`: {e}")))?;
        check_address("imds", &self.imds)?;
        if let Some(program) = self.watch.as_ref().and_then(|watch| watch.pt_converter.as_ref()) {
            check_program("watch.pt_converter", program)?;
        }
        self.preset()?;
        self.entitlement.check()
    }

    /// The preset.
    ///
    /// # Errors
    /// [`Error::Config`] if the runner has no preset of this name.
    pub fn preset(&self) -> Result<Preset> {
        match self.preset.parse() {
            Ok(Preset::Nvcomp) => {
                let what = "`preset`: `nvcomp` needs a GPU, which the runner does not use";
                Err(Error::Config(what.into()))
            }
            known => known.map_err(|_| {
                let name = &self.preset;
                let what = format!("`preset`: `{name}` is not `fast`, `balanced` or `small`");
                Error::Config(what)
            }),
        }
    }

    /// The longest that a shutdown may take.
    #[must_use]
    pub fn drain(&self) -> Duration {
        Duration::from_secs(self.drain_seconds)
    }

    /// Where checkpoints wait until they are durable.
    #[must_use]
    pub fn staging(&self) -> PathBuf {
        self.staging_dir.clone().unwrap_or_else(|| self.state_dir.join("staging"))
    }

    /// The store's folder or URL, without secrets.
    #[must_use]
    pub fn store_name(&self) -> String {
        redact_url(&self.store).into_owned()
    }
}

/// The key whose value follows this text, if the text ends with one.
fn key_before(text: &str) -> Option<&str> {
    let line = text.lines().last()?;
    let key = line.trim_end().strip_suffix('=')?.trim();
    let fits = |c: char| c.is_ascii_alphanumeric() || "_-.\"".contains(c);
    (!key.is_empty() && key.chars().all(fits)).then_some(key)
}

/// A parser's message without the value that it repeats, which may be a secret: what is left says which
/// type was found and which one is expected.
fn without_value(message: &str) -> String {
    let about_value =
        message.starts_with("invalid type: ") || message.starts_with("invalid value: ");
    let begin = message.find(['"', '`']).filter(|_| about_value);
    match (begin, message.rfind(", expected ")) {
        (Some(begin), Some(end)) if begin < end => {
            format!("{}{}", message[..begin].trim_end(), &message[end..])
        }
        (Some(begin), _) => message[..begin].trim_end().to_owned(),
        _ => message.to_owned(),
    }
}

/// Checks that a program can be started: a file, or a name that is looked up in `PATH`.
fn check_program(member: &str, program: &Path) -> Result<()> {
    let is_program = |path: &Path| {
        let mode = std::fs::metadata(path).map(|found| (found.is_file(), found.mode()));
        mode.is_ok_and(|(is_file, mode)| is_file && mode & 0o111 != 0)
    };
    let found = if program.components().count() > 1 || program.is_absolute() {
        is_program(program)
    } else {
        let folders = std::env::var_os("PATH").unwrap_or_default();
        std::env::split_paths(&folders).any(|folder| is_program(&folder.join(program)))
    };
    if found {
        return Ok(());
    }
    Err(Error::Config(format!("`{member}`: {} is not an executable program", program.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str) -> String {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("runner.toml");
        std::fs::write(&path, text).unwrap();
        match Config::read(&path).and_then(|config| config.check()) {
            Ok(()) => String::new(),
            Err(e) => e.to_string(),
        }
    }

    #[test]
    fn what_cannot_work_is_refused_by_name() {
        assert_eq!(check("store = \"runs/a\"\n"), "");
        assert_eq!(check("store = \"s3://bucket/run\"\npreset = \"small\"\n"), "");
        for store in ["foo://x", "s3:/bucket/run", "memory:", "s3://", "file://rel"] {
            let said = check(&format!("store = {store:?}\n"));
            assert!(said.contains("`store`: "), "{store}: {said}");
        }
        let said = check("store = \"a\"\npreset = \"nvcomp\"\n");
        assert!(said.contains("`preset`: `nvcomp` needs a GPU"), "{said}");
        let said = check("store = \"a\"\npreset = \"smal\"\n");
        assert!(said.contains("`smal` is not `fast`, `balanced` or `small`"), "{said}");
        let said = check("store = \"a\"\n\nbogus = 1\n");
        assert!(said.contains("line 3: ") && said.contains("bogus"), "{said}");
        for (line, key) in [
            ("threads = -1", "threads"),
            ("keep_local = \"2\"", "keep_local"),
            ("store = 5", "store"),
            ("[watch]\nfolder = \"x\"\nremove = 1", "remove"),
        ] {
            let said = check(&format!("{line}\n"));
            let number = line.lines().count();
            assert!(said.contains(&format!("line {number}: `{key}`: invalid")), "{line}: {said}");
        }
        let options = "store = \"a\"\n[storage_options]\n";
        for (value, found) in [
            ("12345678", "integer"),
            ("1234.5678", "floating point"),
            ("[\"12345678\"]", "sequence"),
            ("{ key = \"12345678\" }", "map"),
        ] {
            let said = check(&format!("{options}secret = {value}\n"));
            assert!(said.contains(&format!("line 3: `secret`: invalid type: {found}")), "{said}");
            assert!(said.contains("expected a string") && !said.contains("5678"), "{said}");
        }
        let said = check("store = \"a\"\nstorage_options = \"hush, expected `x\"\n");
        assert!(said.ends_with("invalid type: string, expected a map"), "{said}");
        for imds in ["169.254.169.254", "file:///etc", "http://", ""] {
            let said = check(&format!("store = \"a\"\nimds = {imds:?}\n"));
            assert!(said.contains("`imds`: expected an address"), "{imds}: {said}");
        }
        let service =
            "store = \"a\"\n[entitlement]\nmode = \"register-usage\"\nproduct_code = \"x\"\n";
        let said = check(&format!("{service}region = \"eu west\"\n"));
        assert!(said.contains("`region`"), "{said}");
        let said = check(&format!("{service}endpoint = \"metering\"\n"));
        assert!(said.contains("`entitlement.endpoint`: expected an address"), "{said}");
    }

    #[test]
    fn a_converter_must_be_a_program() {
        let check = |program: &str| {
            check(&format!("store = \"a\"\n[watch]\nfolder = \"x\"\npt_converter = {program:?}\n"))
        };
        assert_eq!(check("sh"), "");
        assert_eq!(check("/bin/sh"), "");
        for program in ["no-such-program", "/no/such/program", "/etc/passwd", "/etc", ""] {
            let said = check(program);
            assert!(
                said.contains("`watch.pt_converter`: ")
                    && said.contains("is not an executable program"),
                "{said}"
            );
        }
    }
}
