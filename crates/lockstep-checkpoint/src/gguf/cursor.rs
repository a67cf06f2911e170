//! Reading position in the bytes of a file. Nothing is allocated for a length before the bytes of that length are known to be there.

/// Reading position in bytes.
pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    /// Starts at byte `at`, which must be at most the length of `bytes`.
    pub(super) fn new(bytes: &'a [u8], at: usize) -> Self {
        Self { bytes, at }
    }

    /// Returns the number of bytes read.
    pub(super) fn position(&self) -> usize {
        self.at
    }

    /// Returns the number of bytes that follow.
    pub(super) fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    /// Returns the next `len` bytes.
    pub(super) fn take(&mut self, len: u64, what: &str) -> Result<&'a [u8], String> {
        let rest = &self.bytes[self.at..];
        let taken = usize::try_from(len).ok().and_then(|len| rest.get(..len)).ok_or_else(|| {
            format!("{what} at byte {} claims {len} bytes, but only {} follow", self.at, rest.len())
        })?;
        self.at += taken.len();
        Ok(taken)
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], String> {
        let bytes = self.take(N as u64, what)?;
        Ok(bytes.try_into().expect("`take` returns as many bytes as asked for"))
    }

    /// Returns the next 32-bit number.
    pub(super) fn u32(&mut self, what: &str) -> Result<u32, String> {
        self.array(what).map(u32::from_le_bytes)
    }

    /// Returns the next 64-bit number.
    pub(super) fn u64(&mut self, what: &str) -> Result<u64, String> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// Returns the next string: its length, then its bytes.
    pub(super) fn string(&mut self, what: &str) -> Result<&'a str, String> {
        let at = self.at;
        let len = self.u64(what)?;
        let bytes = self.take(len, what)?;
        str::from_utf8(bytes).map_err(|_| format!("{what} at byte {at} is not UTF-8"))
    }

    /// Skips the next string, whose bytes are not looked at.
    pub(super) fn skip_string(&mut self, what: &str) -> Result<(), String> {
        let len = self.u64(what)?;
        self.take(len, what).map(drop)
    }
}
