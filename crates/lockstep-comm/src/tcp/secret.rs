//! The secret of a run: read from a file, typed as a pairing code, drawn at random for ranks of one host, or kept in memory
//! for the ranks that inherit it.

use std::{
    fmt, fs,
    io::{self, ErrorKind, Read, Write},
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd},
        unix::fs::MetadataExt,
    },
    path::Path,
};

use crate::{CommError, JoinProblem};

/// Minimum length of a secret in bytes.
const SECRET_BYTES: usize = 16;
/// Maximum number of bytes read from a secret file.
const SECRET_LIMIT: u64 = 4096;

/// Secret that all ranks of a job share and no other process knows. Its `Debug` output hides it.
#[derive(Clone)]
pub struct Secret([u8; 32]);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(***)")
    }
}

impl Secret {
    /// Reads the secret from a file that only its owner may read. A file owned by root may also be readable for its group.
    ///
    /// # Errors
    /// If the file cannot be read, if others may read it, or if it is too short.
    pub fn from_file(path: &Path) -> Result<Self, JoinProblem> {
        let problem = |what: String| JoinProblem::SecretFile { path: path.to_owned(), what };
        let metadata = fs::metadata(path).map_err(|error| problem(error.to_string()))?;
        let user = rustix::process::geteuid().as_raw();
        if metadata.is_file() && others_may_read(metadata.mode(), metadata.uid(), user) {
            let mode = metadata.mode() & 0o777;
            return Err(problem(format!("others may read it (mode {mode:o}): chmod 600 it")));
        }
        let mut bytes = Vec::new();
        let file = fs::File::open(path).map_err(|error| problem(error.to_string()))?;
        file.take(SECRET_LIMIT).read_to_end(&mut bytes).map_err(|error| problem(error.to_string()))?;
        let secret = bytes.trim_ascii();
        if secret.len() < SECRET_BYTES {
            return Err(problem(format!("it holds {} bytes: at least {SECRET_BYTES}, random", secret.len())));
        }
        Ok(Self::of(secret))
    }

    /// Derives the secret from `bytes`.
    pub fn of(bytes: &[u8]) -> Self {
        Self(blake3::derive_key("lockstep 2026 job secret", bytes))
    }

    /// Creates a random secret.
    ///
    /// # Errors
    /// If the system has no random bytes.
    pub(crate) fn random() -> Result<Self, JoinProblem> {
        random().map(Self)
    }

    /// Returns the secret with this key, as another process has sent it.
    pub(crate) fn from_key(key: [u8; 32]) -> Self {
        Self(key)
    }

    /// Returns the key for the handshake.
    pub(crate) fn key(&self) -> &[u8; 32] {
        &self.0
    }
}

/// Returns true if a file of this mode and owner is readable by users whom its owner has not chosen. Root's files may be
/// readable for their group: Kubernetes mounts secrets for a pod's user that way.
fn others_may_read(mode: u32, owner: u32, user: u32) -> bool {
    let allowed = if owner == 0 && user != 0 { 0o040 } else { 0 };
    mode & 0o077 & !allowed != 0
}

/// A secret that people can read out and type: 20 characters of Crockford's base 32, which are 100 random bits.
#[derive(Clone, PartialEq, Eq)]
pub struct PairingCode([u8; CODE_CHARACTERS]);

/// Number of characters of a pairing code.
const CODE_CHARACTERS: usize = 20;
/// Number of characters between two hyphens.
const CODE_GROUP: usize = 5;
/// Crockford's alphabet, without I, L, O and U.
const CODE_ALPHABET: &[u8; 32] = b"0123456789ABCDEFGHJKMNPQRSTVWXYZ";

impl PairingCode {
    /// Creates a random code.
    ///
    /// # Errors
    /// If the system has no random bytes.
    pub fn random() -> Result<Self, JoinProblem> {
        let bytes: [u8; CODE_CHARACTERS] = random()?;
        // 256 is a multiple of 32, so all characters are equally likely.
        Ok(Self(std::array::from_fn(|index| CODE_ALPHABET[usize::from(bytes[index]) % CODE_ALPHABET.len()])))
    }

    /// Parses a code in either case, with or without hyphens, O for 0, I and L for 1; `None` if it is malformed.
    pub fn parse(text: &str) -> Option<Self> {
        let mut code = [0; CODE_CHARACTERS];
        let mut characters = text.bytes().filter(|byte| !matches!(byte, b'-' | b' '));
        for place in &mut code {
            let character = match characters.next()?.to_ascii_uppercase() {
                b'O' => b'0',
                b'I' | b'L' => b'1',
                other => other,
            };
            *place = *CODE_ALPHABET.iter().find(|known| **known == character)?;
        }
        characters.next().is_none().then_some(Self(code))
    }

    /// Returns the characters of the code, without hyphens.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Display for PairingCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, character) in self.0.iter().enumerate() {
            let hyphen = if index > 0 && index % CODE_GROUP == 0 { "-" } else { "" };
            write!(f, "{hyphen}{}", char::from(*character))?;
        }
        Ok(())
    }
}

impl fmt::Debug for PairingCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PairingCode(***)")
    }
}

/// A secret in anonymous memory, whose descriptor ranks inherit.
#[derive(Debug)]
pub struct SecretInMemory(fs::File);

impl SecretInMemory {
    /// Creates the secret of the ranks that this process starts, derived from its own.
    ///
    /// # Errors
    /// If the system has no memory for it.
    pub(crate) fn new(secret: &Secret) -> Result<Self, CommError> {
        Self::keep(blake3::Hash::from_bytes(secret.0).to_hex().as_bytes())
            .map_err(CommError::io("keep the run's secret"))
    }

    /// Creates a random secret.
    ///
    /// # Errors
    /// If the system has no random bytes, or no memory.
    pub fn random() -> Result<Self, CommError> {
        Self::new(&Secret::random().map_err(CommError::Join)?)
    }

    fn keep(bytes: &[u8]) -> io::Result<Self> {
        let file = rustix::fs::memfd_create("lockstep-secret", rustix::fs::MemfdFlags::CLOEXEC)?;
        rustix::fs::fchmod(&file, rustix::fs::Mode::RUSR)?;
        let mut file = fs::File::from(file);
        file.write_all(bytes)?;
        Ok(Self(file))
    }

    /// Returns the path from which a process that inherits the descriptor reads it.
    pub fn inherited_path(&self) -> String {
        format!("/proc/self/fd/{}", self.0.as_raw_fd())
    }
}

impl AsFd for SecretInMemory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Returns random bytes of the system.
///
/// # Errors
/// If the system has none.
pub(crate) fn random<const BYTES: usize>() -> Result<[u8; BYTES], JoinProblem> {
    let mut bytes = [0; BYTES];
    match rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty()) {
        Ok(count) if count == BYTES => Ok(bytes),
        _ => Err(JoinProblem::Connection(ErrorKind::Other)),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_secret_of_roots_may_be_given_to_a_group_and_no_other_to_anybody() {
        for (mode, owner, user, expected) in [
            (0o600, 1000, 1000, false),
            (0o400, 1000, 1000, false),
            (0o640, 1000, 1000, true),
            (0o604, 1000, 1000, true),
            (0o440, 0, 1000, false),
            (0o640, 0, 1000, false),
            (0o660, 0, 1000, true),
            (0o444, 0, 1000, true),
            (0o440, 0, 0, true),
        ] {
            assert_eq!(others_may_read(mode, owner, user), expected, "{mode:o} {owner} {user}");
        }
    }

    #[test]
    fn a_secret_that_others_may_read_or_that_is_short_is_refused() {
        let dir = std::env::temp_dir().join(format!("lockstep-secret-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let path = dir.join("secret");
        let verdict = |bytes: &[u8], mode: u32| {
            fs::write(&path, bytes).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            Secret::from_file(&path).map(|_| ()).map_err(|problem| problem.to_string())
        };
        assert_eq!(verdict(b"0123456789abcdef\n", 0o600), Ok(()));
        assert!(verdict(b"0123456789abcdef\n", 0o640).unwrap_err().contains("mode 640"));
        assert!(verdict(b"short\n", 0o600).unwrap_err().contains("5 bytes"));
        fs::remove_dir_all(&dir).unwrap();
        assert!(Secret::from_file(&path).is_err());
        assert_eq!(format!("{:?}", Secret::of(b"x")), "Secret(***)");
    }

    #[test]
    fn a_pairing_code_is_read_as_people_type_it_and_ranks_inherit_what_is_made_of_it() {
        let code = PairingCode::random().unwrap();
        assert_ne!(code, PairingCode::random().unwrap());
        let text = code.to_string();
        assert_eq!((text.len(), text.matches('-').count()), (23, 3), "{text}");
        assert_eq!(PairingCode::parse(&text), Some(code.clone()));
        assert_eq!(PairingCode::parse(&text.to_lowercase().replace('-', " ")), Some(code.clone()));
        assert_eq!(
            PairingCode::parse("olih2-33333-44444-5555Z"),
            PairingCode::parse("011H2 33333 44444 5555z")
        );
        for wrong in ["", "K7QX2", "U0000-00000-00000-00000", &format!("{text}0")] {
            assert_eq!(PairingCode::parse(wrong), None, "{wrong}");
        }
        let first = Secret::of(code.bytes());
        let kept = SecretInMemory::new(&first).unwrap();
        let found = Secret::from_file(Path::new(&kept.inherited_path())).unwrap();
        // All launchers derive the same secret for their ranks, and it differs from their own.
        let again = SecretInMemory::new(&first).unwrap();
        assert_eq!(found.0, Secret::from_file(Path::new(&again.inherited_path())).unwrap().0);
        assert_ne!(found.0, first.0);
    }
}
