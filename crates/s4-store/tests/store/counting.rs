//! An object store that counts requests as S3 bills them: 1000 keys a page, 1000 keys a bulk delete. It
//! can also be full.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use async_trait::async_trait;
use futures::stream::BoxStream;
use futures::{StreamExt, TryStreamExt};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, ObjectStoreExt, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};

const PAGE: u64 = 1000;

#[derive(Debug, Clone, Default)]
pub(crate) struct Counting {
    inner: Arc<InMemory>,
    pub(crate) requests: Arc<AtomicU64>,
    pub(crate) writes: Arc<AtomicU64>,
    pub(crate) deletes: Arc<AtomicU64>,
    /// Writes fail for lack of space until something is deleted.
    pub(crate) full: Arc<AtomicBool>,
    /// Writes fail permanently.
    pub(crate) read_only: Arc<AtomicBool>,
}

impl Counting {
    fn count(&self, n: u64) {
        self.requests.fetch_add(n, Ordering::Relaxed);
    }

    pub(crate) fn reset(&self) {
        for counter in [&self.requests, &self.writes, &self.deletes] {
            counter.store(0, Ordering::Relaxed);
        }
    }
}

impl fmt::Display for Counting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Counting")
    }
}

fn failed(kind: std::io::ErrorKind) -> Error {
    Error::Generic { store: "counting", source: Box::new(std::io::Error::from(kind)) }
}

fn pages(keys: usize) -> u64 {
    (keys as u64).div_ceil(PAGE).max(1)
}

#[async_trait]
impl ObjectStore for Counting {
    async fn put_opts(&self, key: &Path, body: PutPayload, opts: PutOptions) -> Result<PutResult> {
        self.count(1);
        if self.read_only.load(Ordering::Relaxed) {
            return Err(failed(std::io::ErrorKind::ReadOnlyFilesystem));
        }
        if self.full.load(Ordering::Relaxed) {
            return Err(failed(std::io::ErrorKind::StorageFull));
        }
        self.writes.fetch_add(1, Ordering::Relaxed);
        self.inner.put_opts(key, body, opts).await
    }

    async fn put_multipart_opts(
        &self,
        key: &Path,
        opts: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.inner.put_multipart_opts(key, opts).await
    }

    async fn get_opts(&self, key: &Path, options: GetOptions) -> Result<GetResult> {
        self.count(1);
        self.inner.get_opts(key, options).await
    }

    fn delete_stream(
        &self,
        keys: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        let this = self.clone();
        let all = async move {
            let keys: Vec<Path> = keys.try_collect().await?;
            this.count(pages(keys.len()));
            this.deletes.fetch_add(keys.len() as u64, Ordering::Relaxed);
            for key in &keys {
                // Deleting what was not there frees nothing.
                if this.inner.head(key).await.is_ok() {
                    this.full.store(false, Ordering::Relaxed);
                }
            }
            let keys = futures::stream::iter(keys.into_iter().map(Ok)).boxed();
            Ok::<_, Error>(this.inner.delete_stream(keys))
        };
        futures::stream::once(all).try_flatten().boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.paged(self.inner.list(prefix))
    }

    fn list_with_offset(
        &self,
        prefix: Option<&Path>,
        offset: &Path,
    ) -> BoxStream<'static, Result<ObjectMeta>> {
        self.paged(self.inner.list_with_offset(prefix, offset))
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        let listed = self.inner.list_with_delimiter(prefix).await?;
        self.count(pages(listed.objects.len() + listed.common_prefixes.len()));
        Ok(listed)
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.count(1);
        self.inner.copy_opts(from, to, options).await
    }
}

impl Counting {
    fn paged(
        &self,
        list: BoxStream<'static, Result<ObjectMeta>>,
    ) -> BoxStream<'static, Result<ObjectMeta>> {
        let this = self.clone();
        let all = async move {
            let metas: Vec<_> = list.collect().await;
            this.count(pages(metas.len()));
            Ok::<_, Error>(futures::stream::iter(metas))
        };
        futures::stream::once(all).try_flatten().boxed()
    }
}
