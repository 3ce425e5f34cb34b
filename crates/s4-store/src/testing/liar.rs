//! Object stores whose conditional create does not hold, as servers in the wild have it.

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use futures::stream::BoxStream;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, ObjectStoreExt, PutMode, PutMultipartOptions, PutOptions, PutPayload, PutResult,
    Result,
};

/// How a store lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lie {
    /// It ignores the condition and overwrites.
    IgnoresCondition,
    /// It looks first and then writes, and others can slip in between.
    ChecksThenWrites,
    /// It says that it cannot do it.
    NotImplemented,
}

/// An object store that lies about conditional creates.
#[derive(Debug, Clone)]
pub struct Liar {
    inner: Arc<dyn ObjectStore>,
    lie: Lie,
}

impl Liar {
    /// A store that does what `inner` does, but for this lie.
    #[must_use]
    pub fn new(inner: Arc<dyn ObjectStore>, lie: Lie) -> Self {
        Self { inner, lie }
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
        if opts.mode == PutMode::Create {
            match self.lie {
                Lie::IgnoresCondition => {}
                Lie::ChecksThenWrites => {
                    if self.inner.head(key).await.is_ok() {
                        let source = "it is there".into();
                        return Err(Error::AlreadyExists { path: key.to_string(), source });
                    }
                    tokio::task::yield_now().await;
                }
                Lie::NotImplemented => {
                    return Err(Error::NotImplemented {
                        operation: "conditional put".into(),
                        implementer: self.to_string(),
                    });
                }
            }
            opts.mode = PutMode::Overwrite;
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
