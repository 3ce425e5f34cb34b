//! Everything that the attacks ask of the store, through its public interface: if that changes,
//! only this file must follow.

use std::sync::Arc;
use std::time::Duration;

use futures::TryStreamExt;
use object_store::{ObjectStore, ObjectStoreExt};
use s4weights::store::{
    CheckOptions, Checkpoint, CheckpointId, CheckpointStore, Entry, Loaded, Mode, Place, Retention,
    Retry, SaveOptions, StorageOptions, StoreError, StoreOptions, SweepOptions, Writers,
};
use s4weights::{Error, Preset};

use crate::Outcome;
use crate::values::{self, Tensor};

/// The bucket, or container, that the servers have.
const BUCKET: &str = "s4test";
/// The account and key that every Azure emulator knows; no secret.
const AZURE_ACCOUNT: &str = "devstoreaccount1";
const AZURE_KEY: &str =
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==";

/// The protocol of a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Protocol {
    S3,
    Azure,
}

/// A server that stores are created on.
#[derive(Debug, Clone)]
pub(crate) struct Server {
    pub(crate) name: String,
    pub(crate) protocol: Protocol,
    /// `http://127.0.0.1:port`
    pub(crate) address: String,
}

/// Where a store is, as a command line names it.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Target {
    /// A folder, or a URL of `s3:` or `az:`
    #[arg(long)]
    pub(crate) url: String,
    /// The address of the server
    #[arg(long)]
    pub(crate) endpoint: Option<String>,
}

impl Server {
    /// A place for a store on this server.
    pub(crate) fn target(&self, name: &str) -> Target {
        let scheme = match self.protocol {
            Protocol::S3 => "s3",
            Protocol::Azure => "az",
        };
        let url = format!("{scheme}://{BUCKET}/{name}");
        Target { url, endpoint: Some(self.address.clone()) }
    }
}

impl Target {
    /// The arguments that give it to another process.
    pub(crate) fn arguments(&self) -> Vec<String> {
        let mut all = vec!["--url".to_owned(), self.url.clone()];
        if let Some(endpoint) = &self.endpoint {
            all.extend(["--endpoint".to_owned(), endpoint.clone()]);
        }
        all
    }

    /// The same place behind another address.
    pub(crate) fn through(&self, endpoint: &str) -> Self {
        Self { url: self.url.clone(), endpoint: Some(endpoint.to_owned()) }
    }

    fn options(&self) -> StorageOptions {
        let Some(endpoint) = &self.endpoint else { return StorageOptions::new() };
        let account = format!("{endpoint}/{AZURE_ACCOUNT}");
        let pairs: &[(&str, &str)] = if self.url.starts_with("az:") {
            &[("account_name", AZURE_ACCOUNT), ("account_key", AZURE_KEY), ("endpoint", &account)]
        } else {
            &[
                ("key", "test"),
                ("secret", "test"),
                ("endpoint_url", endpoint),
                ("region", "us-east-1"),
            ]
        };
        pairs.iter().map(|&(k, v)| (k.to_owned(), v.to_owned())).collect()
    }

    /// Deletes every object of the store whose key `which` accepts, behind the store's back.
    pub(crate) fn delete_objects(&self, which: impl Fn(&str) -> bool) -> Outcome<usize> {
        let place = Place::open_url(&self.url, &self.options())?;
        let (store, prefix) = place.as_objects().ok_or("a folder has no objects")?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let store: &Arc<dyn ObjectStore> = store;
        runtime.block_on(async {
            let all: Vec<_> = store.list(Some(prefix)).try_collect().await?;
            let doomed: Vec<_> = all.iter().filter(|m| which(m.location.as_ref())).collect();
            for meta in &doomed {
                store.delete(&meta.location).await?;
            }
            Ok(doomed.len())
        })
    }
}

/// Light on the machine, and patient enough for outages of seconds.
fn options() -> StoreOptions {
    let retry = Retry {
        attempts: 8,
        first_pause: Duration::from_millis(50),
        longest_pause: Duration::from_secs(1),
        deadline: Duration::from_secs(30),
        ..Retry::default()
    };
    let mut options = StoreOptions {
        preset: Preset::Fast,
        threads: Some(1),
        max_chain: 6,
        max_hops: 3,
        parent_memory: 8 << 20,
        memory: 8 << 20,
        ..StoreOptions::default()
    };
    options.requests.retry = retry;
    options
}

/// An open store.
pub(crate) struct Store(CheckpointStore);

impl Store {
    /// Creates a store with default options, as most users do.
    pub(crate) fn create(target: &Target) -> Result<Self, Error> {
        CheckpointStore::create(&target.url, &target.options(), options()).map(Self)
    }

    /// Creates a store where the user says that there will be one writer.
    pub(crate) fn create_single(target: &Target) -> Result<Self, Error> {
        let mut options = options();
        options.requests.writers = Writers::Single;
        CheckpointStore::create(&target.url, &target.options(), options).map(Self)
    }

    /// Opens a store that is there.
    pub(crate) fn open(target: &Target) -> Result<Self, Error> {
        CheckpointStore::open(&target.url, &target.options(), options()).map(Self)
    }

    /// Opens a store for the judge, who asks what is there and not how fast: with the usual deadline.
    pub(crate) fn open_to_judge(target: &Target) -> Result<Self, Error> {
        let mut options = options();
        options.requests.retry = Retry::default();
        CheckpointStore::open(&target.url, &target.options(), options).map(Self)
    }

    /// Opens a store, or creates it with default options.
    pub(crate) fn open_or_create(target: &Target) -> Result<Self, Error> {
        CheckpointStore::open_or_create(&target.url, &target.options(), options()).map(Self)
    }

    /// Whether the store is marked as one for several writers.
    pub(crate) fn is_for_many(&self) -> bool {
        self.0.repo().mode == Mode::Many
    }

    /// What identifies the store.
    pub(crate) fn id(&self) -> String {
        self.0.repo().id.to_string()
    }

    /// Saves the values of a step.
    pub(crate) fn save(&self, step: u64, tensors: &[Tensor]) -> Result<Checkpoint, Error> {
        let sources = values::sources(tensors).into_iter().zip([0, 0, 1, 1, 1]);
        let sources: Vec<_> = sources.map(|(t, group)| t.in_group(group)).collect();
        Ok(self.0.save(step, &sources, &SaveOptions::default())?.checkpoint)
    }

    /// All listed checkpoints, the oldest first.
    pub(crate) fn list(&self) -> Result<Vec<Checkpoint>, Error> {
        self.0.list()
    }

    /// The newest checkpoint.
    pub(crate) fn latest(&self) -> Result<Option<Checkpoint>, Error> {
        self.0.latest()
    }

    /// Reads every tensor of a checkpoint.
    pub(crate) fn load(&self, id: CheckpointId) -> Result<Vec<(String, Vec<u8>)>, Error> {
        let loaded: Loaded = self.0.load_id(id, None)?;
        let reader = loaded.reader();
        let names: Vec<String> = reader.tensors().map(|t| t.name.to_owned()).collect();
        names.into_iter().map(|name| reader.read(&name).map(|data| (name, data))).collect()
    }

    /// Retires checkpoints by name.
    pub(crate) fn retire(&self, ids: &[CheckpointId]) -> Result<usize, Error> {
        self.0.retire(ids, "torture")
    }

    /// Retires all but the newest `keep` checkpoints and their ancestors.
    pub(crate) fn retain(&self, keep: u64) -> Result<usize, Error> {
        let keep_last = usize::try_from(keep).ok();
        let policy = Retention { keep_last, ..Retention::default() };
        self.0.apply_retention(&policy).map(|ids| ids.len())
    }

    /// Turns a delta into a base.
    pub(crate) fn rebase(&self, id: CheckpointId) -> Result<(), Error> {
        self.0.rebase(id, None).map(drop)
    }

    /// Deletes what was retired or given up longer ago than `grace`.
    pub(crate) fn sweep(&self, grace: Duration) -> Result<(), Error> {
        self.0.sweep(&SweepOptions { grace, exclusive: true, dry_run: false }).map(drop)
    }

    /// What a check finds wrong, in words. With `data` every value is decoded.
    pub(crate) fn check(&self, data: bool) -> Result<Vec<String>, Error> {
        let report = self.0.check(&CheckOptions { read_data: data, ..CheckOptions::default() })?;
        let findings = report.findings.iter().map(|f| format!("{f:?}"));
        let unusable = report.unusable.iter().map(|(a, b)| format!("{a} needs damaged {b}"));
        Ok(findings.chain(unusable).collect())
    }

    /// The whole log.
    pub(crate) fn log(&self) -> Result<Vec<Entry>, Error> {
        self.0.log(1)
    }
}

/// Whether an error says that there is no store.
pub(crate) fn is_no_store(error: &Error) -> bool {
    matches!(error, Error::Store { source, .. } if matches!(**source, StoreError::NoStore { .. }))
}

/// Whether an error refuses a place because it is not safe there.
pub(crate) fn is_refusal(error: &Error) -> bool {
    matches!(error, Error::Store { source, .. } if matches!(**source, StoreError::Refused(_)))
}

/// How values differ from those of a step; `None` if they do not.
pub(crate) fn difference(seed: u64, step: u64, found: &[(String, Vec<u8>)]) -> Option<String> {
    let wanted = values::at(seed, step);
    if wanted.len() != found.len() {
        return Some(format!("{} tensors instead of {}", found.len(), wanted.len()));
    }
    for tensor in wanted {
        let Some((_, data)) = found.iter().find(|(name, _)| name == tensor.name) else {
            return Some(format!("no tensor `{}`", tensor.name));
        };
        if *data != tensor.data {
            let at = data.iter().zip(&tensor.data).position(|(a, b)| a != b);
            return Some(format!("`{}` differs from byte {at:?} on", tensor.name));
        }
    }
    None
}
