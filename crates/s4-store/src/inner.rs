//! What all handles of an open store share, and who may write.

use std::sync::Arc;

use bytes::Bytes;
use s4_format::Digest;
use tokio::sync::{Mutex, OnceCell};

use crate::entry::Publish;
use crate::error::{Error, Result};
use crate::io::Io;
use crate::known::{Known, Recent};
use crate::layout::{Layout, Part};
use crate::lease::Lease;
use crate::local::Folder;
use crate::manifest::{MAX_MANIFEST, Manifest};
use crate::options::StoreOptions;
use crate::probe::{ProbeReport, probe};
use crate::repo::{MAX_REPO, Mode, Repo};

/// What all handles of an open store share.
#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) name: String,
    pub(crate) server: String,
    pub(crate) layout: Layout,
    pub(crate) io: Io,
    pub(crate) folder: Option<Folder>,
    pub(crate) repo: Repo,
    pub(crate) options: StoreOptions,
    pub(crate) known: Mutex<Known>,
    pub(crate) recent: Recent,
    /// Nothing is written, and a damaged log is no error.
    pub(crate) read_only: bool,
    /// Set once the file system was found to be good enough for writers.
    pub(crate) writable: OnceCell<()>,
    /// In a store for many writers: set once this process may write.
    pub(crate) writer: OnceCell<()>,
    /// Present in a store for one writer at a time.
    pub(crate) lease: Option<Arc<Lease>>,
}

impl Inner {
    /// Makes sure that this process may write: takes the lease of a store for one writer at a time,
    /// or probes again if the store was moved to another server. The file system may be another one
    /// than where the store was created.
    pub(crate) async fn ensure_writer(&self) -> Result<()> {
        if self.read_only {
            return Err(Error::ReadOnly { place: self.name.clone() });
        }
        self.check_writable().await?;
        let Some(lease) = &self.lease else {
            return self.writer.get_or_try_init(|| self.become_writer()).await.map(drop);
        };
        if !lease.take().await? {
            return Ok(());
        }
        // The store may have been opened to many writers since.
        let same = self.check_repo().await;
        if same.is_err() {
            let _ = lease.release().await;
        }
        same
    }

    /// Checks once that the file system below a folder is good enough for writers.
    pub(crate) async fn check_writable(&self) -> Result<()> {
        let check = || async {
            let allow = self.options.allow_network_fs;
            self.folder.as_ref().map_or(Ok(()), |folder| folder.check_writable(allow))
        };
        self.writable.get_or_try_init(check).await.map(drop)
    }

    pub(crate) async fn probe(&self) -> Result<ProbeReport> {
        let local = self.folder.is_some();
        probe(self.io.store(), &self.layout.scratch(), &self.options, local).await
    }

    pub(crate) async fn allow_many(&self) -> Result<ProbeReport> {
        let found = self.probe().await?;
        if !found.many_writers() {
            let what = format!("{}: several writers are unsafe here: {}", self.name, found.detail);
            return Err(Error::Refused(what));
        }
        let repo = Repo {
            mode: Mode::Many,
            probe: found.clone(),
            probed_at: self.server.clone(),
            ..self.repo.clone()
        };
        // A write that may still land would overwrite what others create. This also checks `repo.json`.
        self.append(|_| Ok(None)).await?;
        if let Some(lease) = &self.lease {
            lease.confirm().await?;
        }
        let key = self.layout.repo();
        self.io.put(&key, repo.to_bytes(key.as_ref())?.into()).await?;
        match read_repo(&self.io, &self.layout).await? {
            there if there == repo => Ok(found),
            _ => Err(Error::corrupt(key, "it differs from what was just written")),
        }
    }

    async fn become_writer(&self) -> Result<()> {
        if self.repo.probed_at == self.server {
            return Ok(());
        }
        tracing::warn!(
            store = %self.name, was = %self.repo.probed_at, is = %self.server,
            "this store was created on another server: probing again"
        );
        let found = self.probe().await?;
        if found.many_writers() {
            return Ok(());
        }
        Err(Error::Refused(format!(
            "{} was created for many writers on another server; here conditional writes do not work \
             ({}): copy it to a server where they do",
            self.name, found.detail
        )))
    }

    /// Checks that `repo.json` is there and still has the same id and mode.
    pub(crate) async fn check_repo(&self) -> Result<()> {
        if self.same_repo().await?.mode == self.repo.mode {
            return Ok(());
        }
        Err(Error::Refused(format!(
            "{}: the number of writers allowed has changed: reopen the store",
            self.name
        )))
    }

    /// Checks that `repo.json` is there and still has the same id.
    pub(crate) async fn same_repo(&self) -> Result<Repo> {
        match read_repo(&self.io, &self.layout).await {
            Ok(repo) if repo.id != self.repo.id => {
                let what = "it now holds another store (reopen it to use that one)";
                Err(self.changed(what, true))
            }
            Err(e) if e.is_missing() => Err(self.changed("its `repo.json` is gone", false)),
            other => other,
        }
    }

    /// Whether the log is written with conditional creates. In a store for one writer at a time
    /// they are merely an additional guard.
    pub(crate) fn creates_entries(&self) -> bool {
        let repo = &self.repo;
        repo.mode == Mode::Many || (repo.probe.refuses_second && repo.probed_at == self.server)
    }

    /// A checkpoint's manifest, checked against what the log says about it.
    pub(crate) async fn manifest_of(&self, about: &Publish) -> Result<Manifest> {
        let key = self.layout.part(about.id, Part::Manifest);
        let max = about.manifest_len.min(MAX_MANIFEST);
        let check = |bytes: &Bytes| {
            if Digest::of(bytes) == about.manifest_blake3 {
                Manifest::parse(key.as_ref(), about.id, bytes)
            } else {
                Err(Error::corrupt(&key, "its hash does not match the log"))
            }
        };
        let manifest = match self.io.get_checked(&key, max, check).await {
            // Perhaps the whole store is.
            Err(e) if e.is_missing() => return Err(self.same_repo().await.err().unwrap_or(e)),
            other => other?,
        };
        if manifest.objects.len() as u64 != u64::from(about.objects)
            || manifest.data_len() != about.data_len
            || manifest.parts != about.parts
        {
            return Err(Error::corrupt(key, "its objects do not match the log"));
        }
        Ok(manifest)
    }

    /// Maximum number of requests in flight.
    pub(crate) fn concurrency(&self) -> usize {
        self.options.concurrency.max(1)
    }

    pub(crate) async fn reached(&self, point: &'static str) {
        if let Some(points) = &self.options.crash_points {
            points.reached(point).await;
        }
    }
}

pub(crate) async fn read_repo(io: &Io, layout: &Layout) -> Result<Repo> {
    let key = layout.repo();
    io.get_checked(&key, MAX_REPO, |bytes| Repo::parse(key.as_ref(), bytes)).await
}
