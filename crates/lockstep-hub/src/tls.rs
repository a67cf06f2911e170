//! TLS: the trusted authorities, and cryptography that builds without a C compiler.
//!
//! The cryptography is Graviola's, verified machine code for x86-64 and AArch64. On other processors there is no `https://`.

use std::sync::Arc;

use ureq::tls::{PemItem, RootCerts, TlsConfig, parse_pem};

use crate::error::HubError;

/// Returns the configuration of TLS, or the reason why this machine has none.
///
/// # Errors
/// If the file of certificates that `SSL_CERT_FILE` names cannot be used.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(crate) fn configuration() -> Result<Result<TlsConfig, &'static str>, HubError> {
    if !graviola::util::is_cpu_supported() {
        return Ok(Err(
            "this CPU lacks the instructions for https:// (AES, and on x86-64 AVX2, ADX and BMI2)",
        ));
    }
    let provider = Arc::new(rustls_graviola::default_provider());
    let tls = TlsConfig::builder().unversioned_rustls_crypto_provider(provider).root_certs(authorities()?);
    Ok(Ok(tls.build()))
}

/// Returns the reason why there is no TLS.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
pub(crate) fn configuration() -> Result<Result<TlsConfig, &'static str>, HubError> {
    Ok(Err("https:// is available on x86-64 and AArch64 only"))
}

/// Returns the authorities that are trusted: those of the file that `SSL_CERT_FILE` names, else Mozilla's.
fn authorities() -> Result<RootCerts, HubError> {
    let Some(path) = std::env::var_os("SSL_CERT_FILE").filter(|path| !path.is_empty()) else {
        return Ok(RootCerts::WebPki);
    };
    let wrong = |reason: String| HubError::Setting {
        variable: "SSL_CERT_FILE",
        reason: format!(
            "{}: {reason}; it names a file of certificates in the form of PEM",
            path.to_string_lossy()
        ),
    };
    let pem = std::fs::read(&path).map_err(|error| wrong(error.to_string()))?;
    let mut certificates = Vec::new();
    for item in parse_pem(&pem) {
        if let PemItem::Certificate(certificate) = item.map_err(|error| wrong(error.to_string()))? {
            certificates.push(certificate);
        }
    }
    if certificates.is_empty() {
        return Err(wrong("it has no certificate".to_owned()));
    }
    Ok(RootCerts::Specific(Arc::new(certificates)))
}
