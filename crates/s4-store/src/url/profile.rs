//! Profiles of `~/.aws/credentials` and `~/.aws/config`.

use std::collections::BTreeMap;
use std::path::PathBuf;

use object_store::aws::AmazonS3ConfigKey;

use super::Environment;
use crate::error::{Error, Result};

/// A profile's settings, from both files.
#[derive(Default)]
pub(super) struct Profile {
    name: String,
    /// Whether somebody asked for it by name.
    named: bool,
    lines: BTreeMap<String, String>,
}

/// Settings that a profile may have instead of keys; resolving them takes a program or a service.
const INDIRECT: [&str; 4] = ["credential_process", "sso_session", "sso_start_url", "role_arn"];

/// The profile of this name, or that `AWS_PROFILE` names, or `default`.
pub(super) fn load(name: Option<&str>, environment: &Environment) -> Result<Profile> {
    let wanted = name.or(environment.get("AWS_PROFILE").map(String::as_str));
    let name = wanted.unwrap_or("default").to_owned();
    let mut lines = BTreeMap::new();
    let mut found = false;
    for (variable, file, heading) in [
        ("AWS_CONFIG_FILE", "config", format!("profile {name}")),
        ("AWS_SHARED_CREDENTIALS_FILE", "credentials", name.clone()),
    ] {
        let Some(path) = file_path(environment, variable, file) else { continue };
        let Ok(text) = std::fs::read_to_string(&path) else { continue };
        for (section, key, value) in parse(&text) {
            if section == heading || section == name {
                found = true;
                lines.insert(key, value);
            }
        }
    }
    if wanted.is_some() && !found {
        return Err(Error::Argument(format!("AWS profile `{name}` does not exist or is empty")));
    }
    Ok(Profile { name, named: wanted.is_some(), lines })
}

fn file_path(environment: &Environment, variable: &str, file: &str) -> Option<PathBuf> {
    let home = || environment.get("HOME").or(environment.get("USERPROFILE"));
    let named = environment.get(variable).map(PathBuf::from);
    named.or_else(|| home().map(|home| PathBuf::from(home).join(".aws").join(file)))
}

/// Section, key and value of each line `key = value`. Indented lines belong to the key before them
/// (settings of single services) and are skipped.
fn parse(text: &str) -> Vec<(String, String, String)> {
    let mut section = String::new();
    let mut found = Vec::new();
    for line in text.lines() {
        let indented = line.starts_with([' ', '\t']);
        let line = line.trim();
        if line.is_empty() || line.starts_with(['#', ';']) || indented {
            continue;
        }
        if let Some(name) = line.strip_prefix('[') {
            let name = name.split(']').next().unwrap_or_default();
            section = name.split_whitespace().collect::<Vec<_>>().join(" ");
        } else if let Some((key, value)) = line.split_once('=') {
            // A comment after a value needs a space before it: keys may hold `#`.
            let value = value.split(" #").next().unwrap_or_default().trim();
            found.push((section.clone(), key.trim().to_ascii_lowercase(), value.to_owned()));
        }
    }
    found
}

impl Profile {
    /// The profile's settings; its credentials only if `use_keys` says so.
    pub(super) fn settings(&self, use_keys: bool) -> Result<Vec<(AmazonS3ConfigKey, String)>> {
        let mut known = vec![
            ("region", AmazonS3ConfigKey::Region),
            ("endpoint_url", AmazonS3ConfigKey::Endpoint),
        ];
        if use_keys {
            self.check_direct()?;
            known.extend([
                ("aws_access_key_id", AmazonS3ConfigKey::AccessKeyId),
                ("aws_secret_access_key", AmazonS3ConfigKey::SecretAccessKey),
                ("aws_session_token", AmazonS3ConfigKey::Token),
            ]);
        }
        let line = |(name, key): (&str, AmazonS3ConfigKey)| {
            self.lines.get(name).map(|value| (key, value.clone()))
        };
        Ok(known.into_iter().filter_map(line).collect())
    }

    /// The file of certificates that it trusts.
    pub(super) fn ca_bundle(&self) -> Option<&str> {
        self.lines.get("ca_bundle").map(String::as_str)
    }

    /// Refuses a profile that was asked for by name, but gets its keys in a way that is not
    /// supported.
    fn check_direct(&self) -> Result<()> {
        if !self.named || self.lines.contains_key("aws_access_key_id") {
            return Ok(());
        }
        match INDIRECT.iter().find(|key| self.lines.contains_key(**key)) {
            Some(key) => Err(Error::Argument(format!(
                "AWS profile `{0}` gets its credentials through `{key}`, which is not supported: \
                 `aws configure export-credentials --profile {0} --format env` prints variables to \
                 set instead",
                self.name
            ))),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_format() {
        let text =
            "# c\n[profile  dev]\nregion=eu # north\n s3 =\n   max = 1\nKEY = a=b#c\n[x]\n; n\nq=1";
        let lines: Vec<_> = parse(text);
        let line = |s: &str, k: &str, v: &str| (s.to_owned(), k.to_owned(), v.to_owned());
        let expected = [
            line("profile dev", "region", "eu"),
            line("profile dev", "key", "a=b#c"),
            line("x", "q", "1"),
        ];
        assert_eq!(lines, expected);
    }

    #[test]
    fn what_needs_another_program_is_refused_by_name() {
        let profile = Profile {
            name: "p".into(),
            named: true,
            lines: [("sso_session".to_owned(), "x".to_owned())].into(),
        };
        assert!(profile.settings(true).unwrap_err().to_string().contains("sso_session"));
        assert!(profile.settings(false).unwrap().is_empty());
        assert!(Profile { named: false, ..profile }.settings(true).unwrap().is_empty());
    }
}
