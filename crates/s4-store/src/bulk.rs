//! Requests that concern many objects.

use std::collections::BTreeSet;

use futures::{StreamExt, TryStreamExt};
use object_store::path::Path;
use object_store::{ListResult, ObjectMeta};
use tokio::time::{Instant, timeout_at};

use crate::error::{Error, Result};
use crate::io::Io;

impl Io {
    /// One object below `prefix`, if there is any.
    pub(crate) async fn first_below(&self, prefix: &Path) -> Result<Option<ObjectMeta>> {
        let first = || async { self.store().list(Some(prefix)).try_next().await };
        self.retrying("list", prefix, first).await
    }

    /// The objects and folders directly below `prefix`. A missing place is handled as in [`Self::list`].
    pub(crate) async fn list_level(&self, prefix: &Path) -> Result<ListResult> {
        let list = || self.store().list_with_delimiter(Some(prefix));
        self.retrying("list", prefix, list).await
    }

    /// Deletes objects, in bulk requests where the store supports them. Objects that do not exist are not an error.
    /// Returns those that may still exist, with the reason.
    pub(crate) async fn delete_all(
        &self,
        keys: Vec<Path>,
        concurrency: usize,
    ) -> Vec<(Path, Error)> {
        let mut left: BTreeSet<Path> = keys.iter().cloned().collect();
        if left.len() > 1 {
            let end = Instant::now() + self.retry().deadline;
            let asked = futures::stream::iter(keys.into_iter().map(Ok)).boxed();
            let mut answers = self.store().delete_stream(asked);
            // A failure names no key: whatever was not confirmed is deleted one by one.
            while let Ok(Some(answer)) = timeout_at(end, answers.next()).await {
                match answer {
                    Ok(gone) => {
                        left.remove(&gone);
                    }
                    Err(error) => tracing::debug!(%error, "one deletion of a batch failed"),
                }
            }
        }
        let one = |key: Path| async move { self.delete(&key).await.err().map(|e| (key, e)) };
        let singly = futures::stream::iter(left).map(one).buffer_unordered(concurrency);
        singly.filter_map(|failed| async move { failed }).collect().await
    }
}
