//! Places by URL, with credentials and options as users have them.
//!
//! Later sources win: a profile of `~/.aws`, the environment, the caller's options. Values never
//! appear in messages; names of options do.

mod azure;
mod gcs;
mod profile;
mod s3;

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{ObjectStoreScheme, RetryConfig};
use url::Url;

use crate::error::{Error, Result};
use crate::place::Place;

/// Options of an object store by name: those of `object_store` (`aws_region`, `endpoint`, ...), and
/// what other tools call them (`key`, `secret`, `endpoint_url`, `region_name`, `profile`, ...).
pub type StorageOptions = BTreeMap<String, String>;

/// Environment variables by name.
type Environment = BTreeMap<String, String>;

/// Time for one request, its body included: an object of 64 MiB over a line of 2 Mbit/s.
const TIMEOUT: &str = "300s";

/// The store behind `memory:` URLs, which a URL can name no other way: shared by the whole process.
static MEMORY: OnceLock<Arc<InMemory>> = OnceLock::new();

impl Place {
    /// A place by its path or URL: a folder, `file:`, `memory:`, `s3:`, `gs:`, `az:` (`abfs:`), or
    /// the `https:` address of a bucket or container.
    ///
    /// # Errors
    /// [`Error::Argument`] if the URL or an option makes no sense.
    pub fn open_url(url: &str, options: &StorageOptions) -> Result<Self> {
        // `C:\x` is a path and no URL.
        if !url.contains("://") {
            return Ok(Self::folder(url));
        }
        let bad = |what: String| Error::Argument(format!("{}: {what}", without_secrets(url)));
        let parsed = Url::parse(url).map_err(|e| bad(e.to_string()))?;
        if parsed.scheme() == "file" {
            let path =
                parsed.to_file_path().map_err(|()| bad("it names no local folder".into()))?;
            return Ok(Self::folder(path));
        }
        if parsed.scheme() == "memory" {
            let path = format!("{}{}", parsed.host_str().unwrap_or_default(), parsed.path());
            let path = Path::parse(path.trim_matches('/')).map_err(|e| bad(e.to_string()))?;
            let store = Arc::clone(MEMORY.get_or_init(Arc::default));
            return Ok(Self::named(store, path, url.to_owned(), "memory".into()));
        }
        // Its own message repeats the URL with whatever secret is in it.
        let (scheme, path) = ObjectStoreScheme::parse(&parsed)
            .map_err(|_| bad("a path, or a URL of s3:, gs:, az: or file: is needed".into()))?;
        let (store, server) = match scheme {
            ObjectStoreScheme::AmazonS3 => s3::open(&parsed, options, &environment())?,
            ObjectStoreScheme::GoogleCloudStorage => gcs::open(&parsed, options)?,
            ObjectStoreScheme::MicrosoftAzure => azure::open(&parsed, options)?,
            _ => {
                return Err(bad("a store cannot be kept there: s3:, gs: and az: are known".into()));
            }
        };
        Ok(Self::named(store, path, without_secrets(url), server))
    }
}

fn environment() -> Environment {
    let text = |(key, value): (std::ffi::OsString, std::ffi::OsString)| {
        Some((key.into_string().ok()?, value.into_string().ok()?))
    };
    std::env::vars_os().filter_map(text).collect()
}

/// The URL without user, password, query and fragment.
fn without_secrets(url: &str) -> String {
    match Url::parse(url) {
        Ok(mut parsed) => {
            parsed.set_query(None);
            parsed.set_fragment(None);
            if parsed.password().is_some() {
                // `abfs://container@account` has a user that is none; a password is one.
                let _ = parsed.set_password(None);
            }
            parsed.to_string()
        }
        Err(_) => url.split(['?', '#']).next().unwrap_or_default().to_owned(),
    }
}

/// Few retries: the store repeats requests itself, and reads back what must not be repeated blindly.
fn retry_config() -> RetryConfig {
    RetryConfig { max_retries: 4, retry_timeout: Duration::from_secs(60), ..RetryConfig::default() }
}

fn unknown(kind: &str, key: &str) -> Error {
    Error::Argument(format!("storage option `{key}` is not known for {kind}"))
}

/// What `object_store` says about a configuration names keys and files, not values.
fn refused(kind: &'static str, error: &object_store::Error) -> Error {
    Error::Argument(format!("{kind}: {error}"))
}

fn is_true(value: &str) -> bool {
    matches!(value.to_ascii_lowercase().as_str(), "1" | "true" | "yes" | "on")
}

fn opposite(value: &str) -> String {
    (!is_true(value)).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_and_urls() {
        let none = StorageOptions::new();
        for (text, folder) in [("runs/a", true), ("/x/y", true), ("file:///x/y", true)] {
            let place = Place::open_url(text, &none).unwrap();
            assert_eq!(place.as_folder().is_some(), folder, "{text}");
        }
        assert_eq!(Place::open_url("memory://a/b", &none).unwrap().name(), "memory://a/b");
        for bad in ["ftp://x/y", "s3:///nobucket", "http://x/y", "file://host/x"] {
            assert!(matches!(Place::open_url(bad, &none), Err(Error::Argument(_))), "{bad}");
        }
    }

    #[test]
    fn no_secret_is_shown() {
        let options: StorageOptions = [
            ("key", "AKIDHIDDEN"),
            ("secret", "hush-hush"),
            ("token", "quiet-token"),
            ("region", "eu-west-1"),
        ]
        .map(|(k, v)| (k.to_owned(), v.to_owned()))
        .into();
        let place = Place::open_url("s3://bucket/a?sig=hush-hush", &options).unwrap();
        let azure: StorageOptions = [("account_name", "acc"), ("account_key", "aHVzaC1odXNo")]
            .map(|(k, v)| (k.to_owned(), v.to_owned()))
            .into();
        let other = Place::open_url("az://container/p", &azure).unwrap();
        for text in [format!("{place:?} {}", place.name()), format!("{other:?} {}", other.name())] {
            for secret in ["hush-hush", "quiet-token", "AKIDHIDDEN", "aHVzaC1odXNo"] {
                assert!(!text.contains(secret), "{text}");
            }
        }
        let mut wrong = options;
        wrong.insert("secrte".into(), "hush-hush".into());
        let error = Place::open_url("s3://bucket/a", &wrong).unwrap_err().to_string();
        assert!(error.contains("secrte") && !error.contains("hush-hush"), "{error}");
    }
}
