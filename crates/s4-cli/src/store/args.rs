//! Where a store is, and the options to open it with.

use clap::Args;
use s4weights::store::{CheckpointStore, Retry, StorageOptions, StoreOptions};
use s4weights::{ReadOptions, WriteOptions};

use crate::Remote;
use crate::error::{Failure, Result};

/// What every verb takes: the store, options of its object store, and the form of the output.
#[derive(Args)]
pub(crate) struct StoreArgs {
    /// Folder or URL of the store: a path, s3://bucket/prefix, gs://..., az://...
    #[arg(value_parser = crate::place)]
    pub(crate) store: String,
    /// Option of the object store, such as endpoint_url=http://127.0.0.1:9000 or profile=name; may be
    /// repeated. By default credentials and endpoints come from the environment and ~/.aws
    // A text, not a parsed pair: the parser's own message would repeat what may be a secret.
    #[arg(short = 'o', long = "option", value_name = "KEY=VALUE")]
    options: Vec<String>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    remote: Remote,
}

impl StoreArgs {
    /// The options by name.
    ///
    /// # Errors
    /// `Usage` if one has no name; what was given is not repeated, since it may be a secret.
    pub(crate) fn storage(&self) -> Result<StorageOptions> {
        let mut out = StorageOptions::new();
        for (i, option) in self.options.iter().enumerate() {
            let (key, value) = option.split_once('=').unwrap_or_default();
            if key.is_empty() {
                return Err(Failure::Usage(format!(
                    "option {} of the object store does not have the form KEY=VALUE",
                    i + 1
                )));
            }
            if out.insert(key.to_owned(), value.to_owned()).is_some() {
                return Err(Failure::Usage(format!("option `{key}` is given twice")));
            }
        }
        Ok(out)
    }

    /// Adds the time that requests may take to options of a store.
    pub(crate) fn options(&self, mut options: StoreOptions) -> StoreOptions {
        if let Some(time) = self.remote.timeout {
            options.requests.retry = Retry::within(time);
        }
        options
    }

    /// Options for reading a file, with the same time.
    pub(crate) fn reading(&self) -> ReadOptions {
        self.remote.read(ReadOptions::default())
    }

    /// Options for writing a file, with the same time.
    pub(crate) fn writing(&self, options: WriteOptions) -> WriteOptions {
        self.remote.write(options)
    }

    /// Opens the store.
    pub(crate) fn open(&self) -> Result<CheckpointStore> {
        self.open_with(StoreOptions::default())
    }

    /// Opens the store for reading, also if its log is damaged: then the library warns, and shows what
    /// can be proved.
    pub(crate) fn open_to_read(&self, options: StoreOptions) -> Result<CheckpointStore> {
        let options = self.options(options);
        Ok(CheckpointStore::open_read_only(&self.store, &self.storage()?, options)?)
    }

    /// Opens the store with these options.
    pub(crate) fn open_with(&self, options: StoreOptions) -> Result<CheckpointStore> {
        Ok(CheckpointStore::open(&self.store, &self.storage()?, self.options(options))?)
    }
}
