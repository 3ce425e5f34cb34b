//! Google Cloud Storage.

use std::str::FromStr;
use std::sync::Arc;

use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::{ClientConfigKey, ObjectStore};
use url::Url;

use super::StorageOptions;
use crate::error::Result;

const KIND: &str = "Google Cloud Storage";

pub(super) fn open(url: &Url, options: &StorageOptions) -> Result<(Arc<dyn ObjectStore>, String)> {
    let mut builder = GoogleCloudStorageBuilder::from_env()
        .with_url(url.to_string())
        .with_retry(super::retry_config())
        .with_config(GoogleConfigKey::Client(ClientConfigKey::Timeout), super::TIMEOUT);
    for (name, value) in options {
        builder = match name.to_ascii_lowercase().as_str() {
            // As gcsfs has it: a file, or no credentials at all.
            "token" if value == "anon" => {
                builder.with_config(GoogleConfigKey::SkipSignature, "true")
            }
            "token" => builder.with_config(GoogleConfigKey::ServiceAccount, value),
            "anon" => builder.with_config(GoogleConfigKey::SkipSignature, value),
            "endpoint" | "endpoint_url" => builder.with_config(GoogleConfigKey::BaseUrl, value),
            // The project is needed to make buckets, which a store never does.
            "project" => builder,
            other => {
                let key = GoogleConfigKey::from_str(other);
                builder.with_config(key.map_err(|_| super::unknown(KIND, name))?, value)
            }
        };
    }
    let base = builder.get_config_value(&GoogleConfigKey::BaseUrl);
    let base = base.unwrap_or_else(|| "googleapis.com".into());
    let store = builder.build().map_err(|e| super::refused(KIND, &e))?;
    Ok((Arc::new(store), format!("{KIND} {base} {}", url.host_str().unwrap_or_default())))
}
