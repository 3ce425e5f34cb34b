//! Object stores with a broken conditional create, like some servers in the wild.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use futures::stream::BoxStream;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, ObjectStoreExt, PutMode, PutMultipartOptions, PutOptions, PutPayload, PutResult,
    Result,
};

use super::Random;

/// How a store lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lie {
    /// It ignores the condition and overwrites.
    IgnoresCondition,
    /// It checks first and then writes, and others can slip in between.
    ChecksThenWrites,
    /// It says that it does not support the condition.
    NotImplemented,
}

/// An object store that lies about conditional creates.
#[derive(Debug, Clone)]
pub struct Liar {
    inner: Arc<dyn ObjectStore>,
    lie: Lie,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    honest: AtomicBool,
    gaps: Mutex<Option<Gaps>>,
    created: Mutex<BTreeSet<Path>>,
    overwritten: AtomicU64,
}

impl Shared {
    /// Notes a create that was carried out.
    fn written(&self, key: &Path) {
        let mut created = self.created.lock().unwrap_or_else(PoisonError::into_inner);
        if !created.insert(key.clone()) {
            self.overwritten.fetch_add(1, Ordering::SeqCst);
        }
    }
}

/// Pauses between checking and writing.
#[derive(Debug)]
struct Gaps {
    random: Random,
    one_in: u64,
    longest: Duration,
}

impl Liar {
    /// A store that does what `inner` does, except for this lie.
    #[must_use]
    pub fn new(inner: Arc<dyn ObjectStore>, lie: Lie) -> Self {
        Self { inner, lie, shared: Arc::default() }
    }

    /// Once in `one_in` creates, on average, it waits for up to `longest` between checking and
    /// writing.
    #[must_use]
    pub fn with_gaps(self, seed: u64, one_in: u64, longest: Duration) -> Self {
        *self.gaps() = Some(Gaps { random: Random::new(seed), one_in, longest });
        self
    }

    /// Sets whether it tells the truth. At first it does not.
    pub fn set_honest(&self, honest: bool) {
        self.shared.honest.store(honest, Ordering::SeqCst);
    }

    /// Number of creates that were carried out on objects that had been created before.
    #[must_use]
    pub fn overwritten(&self) -> u64 {
        self.shared.overwritten.load(Ordering::SeqCst)
    }

    fn gaps(&self) -> MutexGuard<'_, Option<Gaps>> {
        self.shared.gaps.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn gap(&self) {
        let gap = self.gaps().as_mut().map(|gaps| {
            let micros = u64::try_from(gaps.longest.as_micros()).unwrap_or(u64::MAX);
            let micros = gaps.random.below(micros);
            gaps.random.one_in(gaps.one_in).then(|| Duration::from_micros(micros))
        });
        match gap {
            Some(Some(gap)) => tokio::time::sleep(gap).await,
            Some(None) => {}
            None => tokio::task::yield_now().await,
        }
    }
}

impl fmt::Display for Liar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Liar({})", self.inner)
    }
}

#[async_trait]
impl ObjectStore for Liar {
    async fn put_opts(
        &self,
        key: &Path,
        payload: PutPayload,
        mut opts: PutOptions,
    ) -> Result<PutResult> {
        if opts.mode == PutMode::Create && !self.shared.honest.load(Ordering::SeqCst) {
            match self.lie {
                Lie::IgnoresCondition => {}
                Lie::ChecksThenWrites => {
                    if self.inner.head(key).await.is_ok() {
                        let source = "it is there".into();
                        return Err(Error::AlreadyExists { path: key.to_string(), source });
                    }
                    self.gap().await;
                }
                Lie::NotImplemented => {
                    return Err(Error::NotImplemented {
                        operation: "conditional put".into(),
                        implementer: self.to_string(),
                    });
                }
            }
            opts.mode = PutMode::Overwrite;
            self.shared.written(key);
        }
        self.inner.put_opts(key, payload, opts).await
    }

    async fn put_multipart_opts(
        &self,
        key: &Path,
        opts: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.inner.put_multipart_opts(key, opts).await
    }

    async fn get_opts(&self, key: &Path, options: GetOptions) -> Result<GetResult> {
        self.inner.get_opts(key, options).await
    }

    fn delete_stream(
        &self,
        keys: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        self.inner.delete_stream(keys)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.inner.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.inner.copy_opts(from, to, options).await
    }
}
