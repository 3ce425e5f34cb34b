//! Locations of stores.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use object_store::ObjectStore;
use object_store::local::LocalFileSystem;
use object_store::path::Path;

use crate::error::{Error, Result};
use crate::local::Folder;

/// A place that holds a checkpoint store, or can.
#[derive(Clone)]
pub struct Place {
    kind: Kind,
    /// For messages; holds no secret.
    name: String,
    /// Kind and address of the object store, without the path. The result of a probe is valid for exactly this.
    server: String,
}

#[derive(Clone)]
enum Kind {
    Folder(PathBuf),
    Objects(Arc<dyn ObjectStore>, Path),
}

/// A place that is being used.
pub(crate) struct Connected {
    pub(crate) store: Arc<dyn ObjectStore>,
    pub(crate) prefix: Path,
    pub(crate) folder: Option<Folder>,
}

impl Place {
    /// A local folder. It need not be there before a store is created in it.
    pub fn folder(path: impl Into<PathBuf>) -> Self {
        let path = path.into();
        let name = path.display().to_string();
        Self { kind: Kind::Folder(path), name, server: "folder".into() }
    }

    /// Objects below `prefix` in an object store of the caller's.
    pub fn objects(store: Arc<dyn ObjectStore>, prefix: Path) -> Self {
        let server = store.to_string();
        let name = format!("{server}/{prefix}");
        Self { kind: Kind::Objects(store, prefix), name, server }
    }

    pub(crate) fn named(
        store: Arc<dyn ObjectStore>,
        prefix: Path,
        name: String,
        server: String,
    ) -> Self {
        Self { kind: Kind::Objects(store, prefix), name, server }
    }

    /// Its name for messages; holds no secret.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn server(&self) -> &str {
        &self.server
    }

    /// The local folder, if it is one.
    #[must_use]
    pub fn as_folder(&self) -> Option<&std::path::Path> {
        match &self.kind {
            Kind::Folder(path) => Some(path),
            Kind::Objects(..) => None,
        }
    }

    /// The object store and the prefix in it, unless it is a local folder.
    #[must_use]
    pub fn as_objects(&self) -> Option<(&Arc<dyn ObjectStore>, &Path)> {
        match &self.kind {
            Kind::Objects(store, prefix) => Some((store, prefix)),
            Kind::Folder(_) => None,
        }
    }

    /// The object store and the prefix in it. With `create`, a missing folder is created.
    pub(crate) fn connect(&self, create: bool) -> Result<Connected> {
        let path = match &self.kind {
            Kind::Objects(store, prefix) => {
                let (store, prefix) = (Arc::clone(store), prefix.clone());
                return Ok(Connected { store, prefix, folder: None });
            }
            Kind::Folder(path) => path,
        };
        let folder = if create { Some(Folder::create(path)?) } else { Folder::existing(path)? };
        let folder = folder.ok_or_else(|| Error::NoStore { place: self.name.clone() })?;
        // Without fsync a published checkpoint could be gone after a power cut. Folders that become
        // empty are left to the sweep.
        let store = LocalFileSystem::new_with_prefix(folder.root())
            .map_err(|e| Error::storage("open", &self.name, e))?
            .with_fsync(true);
        Ok(Connected { store: Arc::new(store), prefix: Path::default(), folder: Some(folder) })
    }
}

impl fmt::Debug for Place {
    /// The object store's own `Debug` may hold credentials.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Place({})", self.name)
    }
}
