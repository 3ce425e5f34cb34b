//! Opens places by URL, with credentials and options in the forms that users already have.
//!
//! Later sources win: a profile of `~/.aws`, the environment, the caller's options. Values never
//! appear in messages; names of options do.

mod azure;
mod client;
mod gcs;
mod option;
mod profile;
mod s3;
mod stall;

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

use object_store::ObjectStoreScheme;
use object_store::memory::InMemory;
use object_store::path::Path;
use url::Url;

use crate::error::{Error, Result};
use crate::place::Place;
use crate::redact::{redact_text, redact_url};

/// Options of an object store by name: those of `object_store` (`aws_region`, `endpoint`, ...), and
/// what other tools call them (`key`, `secret`, `endpoint_url`, `region_name`, `profile`, ...).
pub type StorageOptions = BTreeMap<String, String>;

/// Environment variables by name.
type Environment = BTreeMap<String, String>;

/// The store behind `memory:` URLs, shared by the whole process, since a URL cannot name one in any
/// other way.
static MEMORY: OnceLock<Arc<InMemory>> = OnceLock::new();

impl Place {
    /// A place by its path or URL: a folder, `file:`, `memory:`, `s3:`, `gs:`, `az:` (`abfs:`), or
    /// the `https:` address of a bucket or container.
    ///
    /// # Errors
    /// [`Error::Argument`] if the URL or an option makes no sense.
    pub fn open_url(url: &str, options: &StorageOptions) -> Result<Self> {
        let Some((parsed, remote)) = parse(url)? else {
            check_options(options)?;
            return Ok(Self::folder(url));
        };
        let name = redact_url(url).into_owned();
        let bad = |what: &str| Error::Argument(format!("{name}: {what}"));
        let Some((scheme, path)) = remote else {
            check_options(options)?;
            if parsed.scheme() == "file" {
                let path =
                    parsed.to_file_path().map_err(|()| bad("it does not name a local folder"))?;
                return Ok(Self::folder(path));
            }
            let path = format!("{}{}", parsed.host_str().unwrap_or_default(), parsed.path());
            let path = Path::parse(path.trim_matches('/')).map_err(|e| bad(&e.to_string()))?;
            let store = Arc::clone(MEMORY.get_or_init(Arc::default));
            return Ok(Self::named(store, path, name, "memory".into()));
        };
        let (store, server) = match scheme {
            Remote::S3 => s3::open(&parsed, options, &environment("AWS_")?)?,
            Remote::Gcs => gcs::open(&parsed, options, &environment("GOOGLE_")?)?,
            Remote::Azure => azure::open(&parsed, options, &environment("AZURE_")?)?,
        };
        Ok(Self::named(store, path, name, server))
    }
}

/// Checks that a store may be at a path or URL. Nothing is contacted.
///
/// # Errors
/// [`Error::Argument`] if the URL makes no sense.
pub fn check_url(url: &str) -> Result<()> {
    match parse(url)? {
        Some((parsed, None)) if parsed.scheme() == "file" => {
            Place::open_url(url, &StorageOptions::new()).map(drop)
        }
        _ => Ok(()),
    }
}

/// A URL, with the object store that it names and the path in it, if any.
type Parsed = (Url, Option<(Remote, Path)>);

/// Reads a URL; `None` for a path.
fn parse(url: &str) -> Result<Option<Parsed>> {
    let name = redact_url(url).into_owned();
    let bad = |what: &str| Error::Argument(format!("{name}: {what}"));
    // Perhaps a variable that is not set.
    if url.is_empty() {
        return Err(Error::Argument("the path is empty: the current folder is `.`".into()));
    }
    // `C:\x` is a path and no URL.
    if !url.contains("://") {
        let scheme =
            url.trim_start().split_once(':').map(|(scheme, _)| scheme.to_ascii_lowercase());
        return match scheme.filter(|scheme| SCHEMES.contains(&&scheme[..])) {
            // As a path it would silently be a local folder.
            Some(scheme) => Err(bad(&format!(
                "a URL needs two slashes: {scheme}://...; for a folder of that name, use ./{scheme}:..."
            ))),
            None => Ok(None),
        };
    }
    let parsed = Url::parse(url).map_err(|e| bad(&e.to_string()))?;
    // An unknown scheme is reported before any other mistake in the URL.
    let remote = remote(&parsed).map_err(bad)?;
    check_parts(&parsed).map_err(bad)?;
    Ok(Some((parsed, remote)))
}

/// Schemes of URLs that are often typed.
const SCHEMES: [&str; 11] =
    ["file", "memory", "s3", "s3a", "gs", "az", "adl", "abfs", "abfss", "http", "https"];

/// Whether a text is a URL rather than a path (`C:\x` is a path): true for every URL that
/// [`Place::open_url`] knows, also after leading spaces.
pub fn is_url(text: &str) -> bool {
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '+' | '-' | '.');
    text.trim_start().split_once("://").is_some_and(|(scheme, _)| {
        scheme.starts_with(|c: char| c.is_ascii_alphabetic()) && scheme.chars().all(fits)
    })
}

/// The provider of an object store.
enum Remote {
    S3,
    Gcs,
    Azure,
}

/// The provider that a URL names, and the path in its object store; `None` for `file:` and `memory:`.
fn remote(url: &Url) -> std::result::Result<Option<(Remote, Path)>, &'static str> {
    if matches!(url.scheme(), "file" | "memory") {
        return Ok(None);
    }
    // The parser's own message repeats the URL with any secret in it.
    let (scheme, path) = ObjectStoreScheme::parse(url)
        .map_err(|_| "give a path, or a URL that starts with s3:, gs:, az: or file:")?;
    let remote = match scheme {
        ObjectStoreScheme::AmazonS3 => Remote::S3,
        ObjectStoreScheme::GoogleCloudStorage => Remote::Gcs,
        ObjectStoreScheme::MicrosoftAzure => Remote::Azure,
        _ => return Err("a store cannot be kept there: use s3:, gs:, az: or file:"),
    };
    Ok(Some((remote, path)))
}

/// Refuses parts of a URL that would be ignored silently: two URLs that differ only there would name one store.
fn check_parts(url: &Url) -> std::result::Result<(), &'static str> {
    let container = url.scheme().starts_with("abfs");
    if url.password().is_some() || !(url.username().is_empty() || container) {
        return Err("credentials in a URL are not supported: pass them as storage options");
    }
    if url.query().is_some() || url.fragment().is_some() {
        return Err(
            "`?` and `#` are not supported in a URL: in names, write them as %3F and %23; pass signatures as \
             storage options",
        );
    }
    Ok(())
}

/// Checks options at a place where they have no effect. They are allowed, since the place may be in the
/// cloud at other times; a name that no kind of place knows is a typo.
///
/// # Errors
/// [`Error::Argument`] with the name, and which one may be meant.
pub fn check_options(options: &StorageOptions) -> Result<()> {
    let known = |name: &str| s3::knows(name) || gcs::knows(name) || azure::knows(name);
    match options.keys().find(|name| !known(name)) {
        Some(name) => {
            let all = [&client::NAMES[..], &s3::NAMES, &gcs::NAMES, &azure::NAMES].concat();
            Err(option::unknown("any kind of storage", name, &all))
        }
        None => Ok(()),
    }
}

/// The environment. A variable of the provider's that is not UTF-8 is an error, since it would be
/// ignored silently.
fn environment(prefix: &str) -> Result<Environment> {
    let mut found = Environment::new();
    for (name, value) in std::env::vars_os() {
        let Ok(name) = name.into_string() else { continue };
        match value.into_string() {
            Ok(value) => drop(found.insert(name, value)),
            Err(_) if name.starts_with(prefix) => {
                return Err(Error::Argument(format!("environment variable `{name}` is not UTF-8")));
            }
            Err(_) => {}
        }
    }
    Ok(found)
}

fn refused(kind: &'static str, error: &object_store::Error) -> Error {
    Error::Argument(format!("{kind}: {}", redact_text(&error.to_string())))
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
        for bad in ["", "ftp://x/y", "s3:///nobucket", "http://x/y", "file://host/x"] {
            assert!(matches!(Place::open_url(bad, &none), Err(Error::Argument(_))), "{bad}");
        }
        for url in ["memory://a/b", " memory://a/b", "file:///x/y", "FILE:///x"] {
            assert!(is_url(url) && Place::open_url(url, &none).is_ok(), "{url}");
        }
        for typo in ["s3:/bucket/run", "s3:b", " S3:b", "memory:", "https:/x/y", "file:/x"] {
            assert!(matches!(Place::open_url(typo, &none), Err(Error::Argument(_))), "{typo}");
            assert!(
                check_url(typo).is_err() && Place::open_url(&format!("./{typo}"), &none).is_ok()
            );
        }
        for text in ["runs/a", "s3x:b", "C:\\x", "s3://bucket/run", "file:///x/y", "memory://a"] {
            check_url(text).unwrap();
        }
        for bad in ["foo://x", "http://h/x", "s3://", "file://rel"] {
            assert!(matches!(check_url(bad), Err(Error::Argument(_))), "{bad}");
        }
        for no_url in ["3s://bucket/a", "./a://b", "a b://c", "://x"] {
            assert!(!is_url(no_url) && Place::open_url(no_url, &none).is_err(), "{no_url}");
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
        let place = Place::open_url("s3://bucket/a", &options).unwrap();
        for url in [
            "s3://bucket/a?sig=hush-hush",
            "s3://bucket/a#hush-hush",
            "s3://AKIDHIDDEN:hush-hush@bucket/a",
            "s3://AKIDHIDDEN:hush/hush-hush@bucket/a",
            "gs://AKIDHIDDEN@bucket/a",
            "memory://b/c?hush-hush",
            "file:///a?hush-hush",
            "ftp://AKIDHIDDEN:hush-hush@bucket/a",
        ] {
            let error = Place::open_url(url, &StorageOptions::new()).unwrap_err();
            let text = format!("{error} {error:?}");
            assert!(!text.contains("hush-hush") && !text.contains("AKIDHIDDEN"), "{text}");
        }
        let azure: StorageOptions = [("account_name", "acc"), ("account_key", "aHVzaC1odXNo")]
            .map(|(k, v)| (k.to_owned(), v.to_owned()))
            .into();
        let other = Place::open_url("az://container/p", &azure).unwrap();
        for text in [format!("{place:?} {}", place.name()), format!("{other:?} {}", other.name())] {
            for secret in ["hush-hush", "quiet-token", "AKIDHIDDEN", "aHVzaC1odXNo"] {
                assert!(!text.contains(secret), "{text}");
            }
        }
        let slip: StorageOptions = [("secrte".to_owned(), "hush-hush".to_owned())].into();
        for url in ["runs/a", "file:///x", "memory://x", "gs://b/x", "az://b/x"] {
            let error = Place::open_url(url, &slip).unwrap_err().to_string();
            assert!(error.contains("secrte") && !error.contains("hush-hush"), "{error}");
        }
        Place::open_url("runs/a", &options).unwrap();
        let mut wrong = options;
        wrong.insert("secrte".into(), "hush-hush".into());
        let error = Place::open_url("s3://bucket/a", &wrong).unwrap_err().to_string();
        assert!(error.contains("secrte") && !error.contains("hush-hush"), "{error}");
    }
}
