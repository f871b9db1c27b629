//! Certificates of one's own, in the layout in which QEMU looks for them.
//!
//! Promises: each [`Authority`] is another one; files are made in directories of the caller.

use std::path::Path;

use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, DistinguishedName,
    DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyIdMethod, KeyPair, KeyUsagePurpose,
    RevokedCertParams, SerialNumber, date_time_ymd,
};

/// Signs certificates.
#[derive(Debug)]
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
}

/// What a certificate says.
#[derive(Clone, Debug)]
pub struct Subject<'a> {
    /// The common name.
    pub name: &'a str,
    /// The organization, or none.
    pub organization: Option<&'a str>,
    /// Names and addresses of the host.
    pub hosts: &'a [&'a str],
    /// It has expired.
    pub has_expired: bool,
    /// Its number, for lists of those that were revoked.
    pub serial: u64,
}

impl Default for Subject<'_> {
    /// `CN=localhost`, for this machine.
    fn default() -> Self {
        Subject {
            name: "localhost",
            organization: None,
            hosts: &["localhost", "127.0.0.1"],
            has_expired: false,
            serial: 1,
        }
    }
}

impl Authority {
    /// A new one.
    #[must_use]
    pub fn new() -> Authority {
        let mut params = CertificateParams::default();
        params.distinguished_name = distinguished("an authority", None);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let key = KeyPair::generate().expect("a key");
        let pem = params.self_signed(&key).expect("a certificate").pem();
        Authority { issuer: Issuer::new(params, key), pem }
    }

    /// Writes `ca-cert.pem`.
    pub fn write(&self, directory: &Path) {
        write(directory, "ca-cert.pem", &self.pem);
    }

    /// Writes `NAME-cert.pem` and `NAME-key.pem`.
    ///
    /// * `name`: `server` or `client`.
    pub fn issue(&self, directory: &Path, name: &str, subject: &Subject<'_>) {
        let hosts: Vec<String> = subject.hosts.iter().map(|host| (*host).to_owned()).collect();
        let mut params = CertificateParams::new(hosts).expect("names of hosts");
        params.distinguished_name = distinguished(subject.name, subject.organization);
        params.serial_number = Some(SerialNumber::from(subject.serial));
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        if subject.has_expired {
            (params.not_before, params.not_after) =
                (date_time_ymd(2020, 1, 1), date_time_ymd(2021, 1, 1));
        }
        let key = KeyPair::generate().expect("a key");
        let certificate = params.signed_by(&key, &self.issuer).expect("a certificate");
        write(directory, &format!("{name}-cert.pem"), &certificate.pem());
        write(directory, &format!("{name}-key.pem"), &key.serialize_pem());
    }

    /// Writes `ca-crl.pem`: the certificate with this number is revoked.
    pub fn revoke(&self, directory: &Path, serial: u64) {
        let revoked = RevokedCertParams {
            serial_number: SerialNumber::from(serial),
            revocation_time: date_time_ymd(2024, 1, 1),
            reason_code: None,
            invalidity_date: None,
        };
        let list = CertificateRevocationListParams {
            this_update: date_time_ymd(2024, 1, 1),
            next_update: date_time_ymd(4000, 1, 1),
            crl_number: SerialNumber::from(1),
            issuing_distribution_point: None,
            revoked_certs: vec![revoked],
            key_identifier_method: KeyIdMethod::Sha256,
        };
        let list = list.signed_by(&self.issuer).expect("a list");
        write(directory, "ca-crl.pem", &list.pem().expect("PEM"));
    }
}

impl Default for Authority {
    fn default() -> Authority {
        Authority::new()
    }
}

/// An authority, a server and a client in one directory.
#[must_use]
pub fn all(directory: &Path) -> Authority {
    let authority = Authority::new();
    authority.write(directory);
    authority.issue(directory, "server", &Subject::default());
    let client = Subject { name: "a client", organization: Some("A"), ..Subject::default() };
    authority.issue(directory, "client", &client);
    authority
}

fn distinguished(name: &str, organization: Option<&str>) -> DistinguishedName {
    let mut all = DistinguishedName::new();
    if let Some(organization) = organization {
        all.push(DnType::OrganizationName, organization);
    }
    all.push(DnType::CommonName, name);
    all
}

fn write(directory: &Path, name: &str, text: &str) {
    std::fs::write(directory.join(name), text).expect("a file of certificates");
}
