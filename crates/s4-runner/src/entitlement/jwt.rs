//! Signed replies: a JSON Web Token with a pinned key and algorithm.

use jsonwebtoken::{Algorithm, DecodingKey, Validation, decode};
use serde::Deserialize;

use super::{No, Settings};
use crate::error::{Error, Result};

/// The most bytes of a key file.
const MAX_KEY: usize = 64 << 10;

/// The key that signs replies.
pub(super) struct Key {
    key: DecodingKey,
    validation: Validation,
}

/// The required content of a reply.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Claims {
    product_code: String,
    public_key_version: u32,
    nonce: Option<String>,
}

impl Key {
    pub(super) fn read(settings: &Settings) -> Result<Self> {
        let bad = |what: String| Error::Config(format!("`entitlement`: {what}"));
        let path = settings.public_key.as_ref();
        let path = path.ok_or_else(|| bad("`public_key` is missing".into()))?;
        let pem = std::fs::read(path).map_err(|e| bad(format!("{}: {e}", path.display())))?;
        if pem.len() > MAX_KEY {
            return Err(bad(format!("{}: not a public key", path.display())));
        }
        let algorithm: Algorithm = settings
            .algorithm
            .parse()
            .map_err(|_| bad(format!("`algorithm`: `{}` is not supported", settings.algorithm)))?;
        use Algorithm as A;
        let key = match algorithm {
            A::RS256 | A::RS384 | A::RS512 | A::PS256 | A::PS384 | A::PS512 => {
                DecodingKey::from_rsa_pem(&pem)
            }
            A::ES256 | A::ES384 => DecodingKey::from_ec_pem(&pem),
            // With HMAC, anybody who knows the public key could sign, with the key as the secret.
            _ => return Err(bad(format!("`algorithm`: `{}` is not allowed", settings.algorithm))),
        };
        let key = key.map_err(|e| bad(format!("{}: {e}", path.display())))?;
        let mut validation = Validation::new(algorithm);
        validation.required_spec_claims.clear();
        validation.validate_aud = false;
        validation.validate_nbf = true;
        Ok(Self { key, validation })
    }

    /// Checks that a reply is signed, and answers exactly this request.
    pub(super) fn check(
        &self,
        token: &str,
        settings: &Settings,
        nonce: &str,
    ) -> std::result::Result<(), No> {
        let bad = |e: jsonwebtoken::errors::Error| {
            No::new("bad_signature", format!("the reply's signature: {e}"))
        };
        let claims = decode::<Claims>(token, &self.key, &self.validation).map_err(bad)?.claims;
        if claims.product_code != settings.product_code {
            return Err(No::new("wrong_product", "the reply is for another product"));
        }
        if claims.public_key_version != settings.public_key_version {
            return Err(No::new("wrong_key_version", "the reply names another version of the key"));
        }
        match claims.nonce.as_deref() == Some(nonce) {
            true => Ok(()),
            false => Err(No::new("wrong_nonce", "the reply is for another request")),
        }
    }
}
